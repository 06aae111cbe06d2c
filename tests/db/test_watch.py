"""Watched tables: which changes become events, what those contain, and which role may watch."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue
from support.sessions import Running, wait_until_blocked


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    queue.call("create_event_type", "order.changed")
    queue.call("subscribe", "order.changed", "shop")
    queue.db.execute("create schema sales")
    queue.db.execute("create table sales.orders (id bigint primary key, status text, total numeric, secret text)")
    return queue


def watch(queue: Queue, table: str = "sales.orders", **options: Any) -> int:
    places = "".join(f", p_{name} => %s" for name in options)
    return int(queue.value(f"select ulak.watch(%s, 'order.changed'{places})", table, *options.values()))


def changes(queue: Queue, *statements: str) -> list[dict[str, Any]]:
    """The payloads of the events that these statements cause."""
    last = queue.value("select coalesce(max(id), 0) from ulak.queue")
    for statement in statements:
        queue.db.execute(statement)
    return queue.column("select payload from ulak.queue where id > %s order by id", last)


def event(operation: str, old: Any = None, new: Any = None, table: str = "sales.orders") -> dict[str, Any]:
    return {"operation": operation, "table": table, **{k: v for k, v in (("old", old), ("new", new)) if v is not None}}


def test_insert_update_and_delete_become_events_with_the_columns_that_were_asked_for(queue: Queue) -> None:
    watch(queue, columns=["id", "status"])

    found = changes(
        queue,
        "insert into sales.orders values (1, 'new', 5, 'x')",
        "update sales.orders set status = 'paid'",
        "delete from sales.orders",
    )

    assert found == [
        event("insert", new={"id": 1, "status": "new"}),
        event("update", old={"id": 1, "status": "new"}, new={"id": 1, "status": "paid"}),
        event("delete", old={"id": 1, "status": "paid"}),
    ]


def test_all_columns_that_the_table_has_are_sent_and_none_that_it_gets_later(queue: Queue) -> None:
    watch(queue)
    queue.db.execute("alter table sales.orders add column later text default 'z'")

    (found,) = changes(queue, "insert into sales.orders values (1, 'new', 5, 'x')")

    assert found["new"] == {"id": 1, "status": "new", "total": 5, "secret": "x"}


def test_only_operations_that_are_asked_for_count(queue: Queue) -> None:
    watch(queue, operations=["delete"], columns=["id"])

    found = changes(
        queue, "insert into sales.orders values (1)", "update sales.orders set total = 1", "delete from sales.orders"
    )

    assert found == [event("delete", old={"id": 1})]


def test_an_update_counts_if_a_sent_column_has_changed_or_one_of_those_that_are_named(queue: Queue) -> None:
    queue.db.execute("insert into sales.orders values (1, 'new', 5), (2, 'new', 5)")
    watch(queue, columns=["id", "status"], operations=["update"])

    assert changes(queue, "update sales.orders set total = 6") == []
    assert changes(queue, "update sales.orders set status = 'new'") == []
    assert len(changes(queue, "update sales.orders set status = 'paid' where id = 1")) == 1

    queue.value("select ulak.unwatch('sales.orders', 'order.changed')")
    watch(queue, columns=["id"], operations=["update"], changed=["total"])
    assert changes(queue, "update sales.orders set status = 'x'") == []
    assert changes(queue, "update sales.orders set total = 7 where id = 2") == [event("update", {"id": 2}, {"id": 2})]


def test_a_condition_sees_every_column_of_the_old_and_the_new_row(queue: Queue) -> None:
    watch(queue, columns=["id"], condition='$.new.status == "paid" && ($.old == null || $.old.status != "paid")')

    found = changes(
        queue,
        "insert into sales.orders values (1, 'new'), (2, 'paid')",
        "update sales.orders set id = id, status = 'paid', total = 1",
        "delete from sales.orders",
    )

    assert [(each["operation"], each["new"]) for each in found] == [("insert", {"id": 2})]
    watched = queue.value("select ulak.unwatch('sales.orders', 'order.changed')")
    assert watched
    watch(queue, columns=["id", "status"], condition='$.new.status == "paid" && $.old.status != "paid"')
    queue.db.execute("insert into sales.orders values (3, 'new'), (4, 'paid')")
    (found,) = changes(queue, "update sales.orders set status = 'paid'")
    assert found["new"] == {"id": 3, "status": "paid"}


def test_an_update_of_the_primary_key_is_a_delete_and_an_insert(queue: Queue) -> None:
    queue.db.execute("insert into sales.orders values (1), (2)")
    watch(queue, columns=["id"])

    found = changes(queue, "update sales.orders set id = id + 1 where id = 2")
    assert sorted(found, key=lambda each: str(each["operation"])) == [
        event("delete", old={"id": 2}),
        event("insert", new={"id": 3}),
    ]

    queue.value("select ulak.unwatch('sales.orders', 'order.changed')")
    watch(queue, columns=["id"], operations=["update", "insert"])
    assert changes(queue, "update sales.orders set id = 9 where id = 3") == [event("insert", new={"id": 9})]


@pytest.mark.parametrize(
    ("ordering_key", "expected"),
    [(None, "7"), (["status"], "new"), (["status", "id"], '["new","7"]'), ([], None)],
)
def test_the_ordering_key_is_the_primary_key_or_named_columns(
    queue: Queue, ordering_key: list[str] | None, expected: str | None
) -> None:
    watch(queue, ordering_key=ordering_key)

    changes(queue, "insert into sales.orders values (7, 'new')")

    assert queue.column("select ordering_key from ulak.sent()") == [expected]


def test_a_key_of_several_columns_pairs_rows_and_a_long_one_is_known_by_its_hash(queue: Queue) -> None:
    queue.db.execute("create table sales.wide (a text, b date, n int, primary key (a, b))")
    watch(queue, "sales.wide")
    queue.db.execute("insert into sales.wide values (repeat('x', 900), '2026-01-02', 1), ('y', '2026-01-02', 1)")

    found = changes(queue, "update sales.wide set n = n + 1")

    assert {(each["old"]["a"][0], each["old"]["n"], each["new"]["n"]) for each in found} == {("x", 1, 2), ("y", 1, 2)}
    short, long = sorted(queue.column("select distinct ordering_key from ulak.sent()"), key=len)
    assert (short, len(long)) == ('["y","2026-01-02"]', 64)


def test_many_rows_of_a_statement_are_published_as_one_set(queue: Queue) -> None:
    watch(queue, columns=["id", "total"])

    changes(queue, "insert into sales.orders select n, 'new', n from generate_series(1, 1000) n")
    found = changes(queue, "update sales.orders set total = total + 1 where id <= 500")

    assert len(found) == 500
    assert all(each["new"]["total"] == each["old"]["total"] + 1 and each["new"]["id"] <= 500 for each in found)
    assert queue.value("select count(distinct created_at) from ulak.queue") == 1


def test_upserts_merges_and_ctes_are_seen(queue: Queue) -> None:
    watch(queue, columns=["id", "status"])
    queue.db.execute("insert into sales.orders values (1, 'new')")

    found = changes(
        queue,
        "insert into sales.orders values (1, 'x'), (2, 'y') on conflict (id) do update set status = excluded.status",
        "with gone as (delete from sales.orders where id = 1 returning *) insert into sales.orders select 3, 'z' from gone",
    )

    assert sorted((each["operation"], each.get("new", each.get("old"))["id"]) for each in found) == [
        ("delete", 1),
        ("insert", 2),
        ("insert", 3),
        ("update", 1),
    ]


def test_truncate_is_an_event_of_its_own_for_those_who_ask(queue: Queue) -> None:
    watch(queue, operations=["delete", "truncate"])
    queue.db.execute("insert into sales.orders values (1)")

    assert changes(queue, "truncate sales.orders") == [event("truncate")]

    queue.value("select ulak.unwatch('sales.orders', 'order.changed')")
    watch(queue)
    queue.db.execute("insert into sales.orders values (1)")
    assert changes(queue, "truncate sales.orders") == []


def test_a_renamed_table_and_a_renamed_column_are_still_sent_by_the_old_column_name(queue: Queue) -> None:
    watch(queue, columns=["id", "status"], changed=["status"], ordering_key=["status"])
    queue.db.execute("alter table sales.orders rename column status to state")
    queue.db.execute("alter table sales.orders rename column secret to status")
    queue.db.execute("alter table sales.orders rename to purchases")

    found = changes(
        queue,
        "insert into sales.purchases (id, state, status) values (1, 'new', 'secret')",
        "update sales.purchases set state = 'paid'",
        "update sales.purchases set status = 'other'",
    )

    assert found == [
        event("insert", new={"id": 1, "status": "new"}, table="sales.purchases"),
        event("update", {"id": 1, "status": "new"}, {"id": 1, "status": "paid"}, "sales.purchases"),
    ]
    assert queue.value("select table_name from ulak.watch_list") == "sales.purchases"
    assert findings(queue) == []


def findings(queue: Queue) -> list[tuple[str, str]]:
    rows = queue.rows("""select finding, fix from ulak.doctor() where "check" = 'watch' order by finding""")
    return [(row["finding"], row["fix"]) for row in rows]


def test_a_dropped_column_is_left_out_and_doctor_says_so(queue: Queue) -> None:
    id = watch(queue, columns=["id", "status"])
    queue.db.execute("alter table sales.orders drop column status")

    assert changes(queue, "insert into sales.orders values (1)") == [event("insert", new={"id": 1})]
    ((finding, _),) = findings(queue)
    assert finding == f"watch {id} of table sales.orders leaves out what is gone from it: column status"


def test_a_watch_whose_event_type_is_gone_fails_no_writer_and_doctor_says_so(queue: Queue) -> None:
    id = watch(queue)
    queue.call("drop_event_type", "order.changed")

    assert changes(queue, "insert into sales.orders values (1)") == []
    ((finding, fix),) = findings(queue)
    assert finding == f'watch {id} of table sales.orders publishes nothing: event type "order.changed" is gone'
    assert fix.startswith("select ulak.create_event_type('order.changed');")


def test_a_watch_whose_table_is_gone_is_named_by_doctor(queue: Queue) -> None:
    id = watch(queue)
    queue.db.execute("drop table sales.orders")

    assert findings(queue) == [
        (
            f"watch {id} publishes nothing: table sales.orders or its triggers are gone",
            f"select ulak.unwatch({id}); -- and watch() it again, if it is still there",
        )
    ]
    assert queue.value("select ulak.unwatch(%s::bigint)", id) is True
    assert findings(queue) == []


def test_unwatch_leaves_nothing_on_the_table(queue: Queue) -> None:
    id = watch(queue)

    assert queue.value("select ulak.unwatch('sales.orders', 'order.changed')") is True

    assert queue.value("select count(*) from pg_trigger where tgrelid = 'sales.orders'::regclass") == 0
    assert changes(queue, "insert into sales.orders values (1)") == []
    assert queue.value("select ulak.unwatch('sales.orders', 'order.changed')") is False
    assert queue.value("select ulak.unwatch(%s::bigint)", id) is False


def test_a_partitioned_table_is_watched_as_a_whole_but_not_behind_its_back(queue: Queue) -> None:
    queue.db.execute(
        "create table sales.logs (id int, kind text, n int, primary key (id, kind)) partition by list (kind)"
    )
    for kind in "ab":
        queue.db.execute(f"create table sales.logs_{kind} partition of sales.logs for values in ('{kind}')")
    watch(queue, "sales.logs", columns=["id", "kind"])

    found = changes(
        queue,
        "insert into sales.logs values (1, 'a'), (2, 'b')",
        "update sales.logs set kind = 'b' where id = 1",
        "delete from sales.logs where id = 2",
        "insert into sales.logs_a values (3, 'a')",
    )

    assert [(each["operation"], each.get("new", each.get("old"))) for each in found[:2]] == [
        ("insert", {"id": 1, "kind": "a"}),
        ("insert", {"id": 2, "kind": "b"}),
    ]
    assert sorted((each["operation"], each.get("new", each.get("old"))["kind"]) for each in found[2:]) == [
        ("delete", "a"),
        ("delete", "b"),
        ("insert", "b"),
    ]


def test_what_replication_applies_is_no_event(queue: Queue) -> None:
    watch(queue)
    queue.db.execute("set local session_replication_role = replica")

    assert changes(queue, "insert into sales.orders values (1)") == []


def test_a_schema_of_the_event_type_holds_for_changes_too(queue: Queue) -> None:
    watch(queue)
    queue.call("alter_event_type", "order.changed", schema='{"properties": {"new": {"required": ["id", "total"]}}}')
    queue.db.execute("alter table sales.orders drop column total")

    with pytest.raises(psycopg.errors.InvalidParameterValue), queue.db.transaction():
        queue.db.execute("insert into sales.orders values (1)")


def test_values_of_every_kind_are_sent(queue: Queue) -> None:
    queue.db.execute("create type sales.mood as enum ('good', 'bad')")
    queue.db.execute("create domain sales.price as numeric check (value > 0)")
    queue.db.execute(
        "create table sales.kinds (id uuid primary key, at timestamptz, moods sales.mood[], mood sales.mood,"
        ' price sales.price, tags text[], doc json, big bytea, span int4range, "Odd ""name" text)'
    )
    watch(queue, "sales.kinds")

    (found,) = changes(
        queue,
        "insert into sales.kinds values ('00000000-0000-0000-0000-000000000001', '2026-01-02 03:04Z', '{good,bad}', 'bad',"
        """ 9.50, '{a,b}', '{"x": [1]}', '\\x01', '[1,3)', 'odd')""",
    )

    new = found["new"]
    assert new["at"].startswith("2026-01-02T")
    assert (new["mood"], new["price"], new["tags"], new["doc"]) == ("bad", 9.5, ["a", "b"], {"x": [1]})
    assert (new["big"], new["span"], new['Odd "name']) == ("\\x01", "[1,3)", "odd")


def test_a_table_of_many_columns_is_sent_whole(queue: Queue) -> None:
    columns = ", ".join(f"c{n} int default {n}" for n in range(300))
    queue.db.execute(f"create table sales.wide (id int primary key, {columns})")
    watch(queue, "sales.wide", condition="$.new.c299 == 299")

    (found,) = changes(queue, "insert into sales.wide (id) values (1)")

    assert len(found["new"]) == 301


@pytest.mark.parametrize(
    ("statement", "code", "message"),
    [
        ("select ulak.watch('sales.orders', 'order.chnged')", "42704", 'unknown event type "order.chnged"'),
        (
            "select ulak.watch('sales.orders', 'ulak.message.dead')",
            "42939",
            'event type "ulak.message.dead" is reserved',
        ),
        (
            "select ulak.watch('sales.orders', 'order.changed', p_columns => '{id,statos}')",
            "42703",
            'table sales.orders has no column "statos"',
        ),
        (
            "select ulak.watch('sales.orders', 'order.changed', p_operations => '{upsert}')",
            "22023",
            "operations must be some of insert, update, delete and truncate",
        ),
        (
            "select ulak.watch('sales.orders', 'order.changed', p_condition => '$.new.id')",
            "22023",
            "the predicate is a path, not a condition",
        ),
        ("select ulak.watch('sales.keyless', 'order.changed')", "55000", "table sales.keyless has no primary key"),
        ("select ulak.watch('ulak.endpoints', 'order.changed')", "42809", "ulak.endpoints can't be watched"),
        ("select ulak.watch('pg_stat_activity', 'order.changed')", "42809", "pg_stat_activity can't be watched"),
        ("select ulak.watch('sales.twice', 'order.changed')", "23505", None),
    ],
)
def test_what_cannot_be_watched_is_refused(queue: Queue, statement: str, code: str, message: str | None) -> None:
    queue.db.execute("create table sales.keyless (a int)")
    queue.db.execute("create table sales.twice (a int primary key)")
    watch(queue, "sales.twice")

    with pytest.raises(psycopg.Error) as refused, queue.db.transaction():
        queue.db.execute(statement)  # type: ignore[arg-type]

    assert refused.value.sqlstate == code
    assert message is None or refused.value.diag.message_primary == message
    assert queue.value("select count(*) from ulak.watches") == 1


def test_of_two_sessions_that_watch_a_table_for_the_same_events_one_is_refused(db: DB, connect: Connect) -> None:
    Queue(db).call("create_event_type", "order.changed")
    db.execute("create table orders (id int primary key)")
    one, other = connect(), connect()
    statement = "select ulak.watch('orders', 'order.changed')"
    with one.transaction():
        one.execute(statement)
        second = Running(lambda: other.execute(statement))
        wait_until_blocked(other, db)

    with pytest.raises(psycopg.errors.UniqueViolation):
        second.result()
    assert db.execute("select count(*) from ulak.watch_list").fetchone() == (1,)


def test_a_table_without_a_primary_key_is_watched_for_inserts_and_deletes(queue: Queue) -> None:
    queue.db.execute("create table sales.keyless (a int)")
    watch(queue, "sales.keyless", operations=["insert", "delete"])

    found = changes(queue, "insert into sales.keyless values (1), (1)", "delete from sales.keyless")

    assert [each["operation"] for each in found] == ["insert"] * 2 + ["delete"] * 2


def test_a_primary_key_that_is_dropped_later_ends_the_pairing_and_nothing_else(queue: Queue) -> None:
    watch(queue, columns=["id"])
    queue.db.execute("insert into sales.orders values (1)")
    queue.db.execute("alter table sales.orders drop constraint orders_pkey")

    assert changes(queue, "update sales.orders set id = 2") == [event("update", new={"id": 2})]


def test_the_transactions_trace_travels_with_its_changes(queue: Queue) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    watch(queue)
    queue.db.execute(f"set local ulak.traceparent = '{parent}'")
    changes(queue, "insert into sales.orders values (1)")

    assert queue.column("select headers ->> 'traceparent' from ulak.sent()") == [parent]


@pytest.mark.parametrize("name", ["s", "r", "n", "o", "c", "sent", "whole", "50%s", 'say "x"', "{id}"])
def test_a_column_may_have_any_name(queue: Queue, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    queue.db.execute(f"create table sales.odd (id integer primary key, {quoted} text)".encode())
    watch(queue, "sales.odd", condition="exists($.new.id)")

    found = changes(queue, "insert into sales.odd values (1, null)", f"update sales.odd set {quoted} = 'b'")

    assert found == [
        event("insert", new={"id": 1, name: None}, table="sales.odd"),
        event("update", old={"id": 1, name: None}, new={"id": 1, name: "b"}, table="sales.odd"),
    ]


def test_triggers_that_an_administrator_made_by_hand_do_not_break_the_views(queue: Queue) -> None:
    id = watch(queue)
    for number, arguments in enumerate(("", f"{id}, {id}", "'x'", "99999999999999999999")):
        queue.db.execute(
            f"create trigger own_{number} after insert on sales.orders for each statement"
            f" execute function ulak_private.publish_changes({arguments})"
        )

    assert queue.rows("select id, table_name from ulak.watch_list") == [{"id": id, "table_name": "sales.orders"}]


def test_a_row_whose_primary_key_is_an_empty_text_is_updated_as_any_other(queue: Queue) -> None:
    queue.db.execute("create table sales.names (name text primary key, n integer)")
    watch(queue, "sales.names")

    found = changes(queue, "insert into sales.names values ('', 1), ('a', 1)", "update sales.names set n = 2")

    assert sorted(each["operation"] for each in found) == ["insert", "insert", "update", "update"]
    assert set(queue.column("select ordering_key from ulak.queue")) == {None, "a"}


def test_an_event_does_not_depend_on_the_settings_of_the_session_that_writes(queue: Queue) -> None:
    queue.db.execute(
        "create table sales.readings (at timestamptz, degrees float8, span interval, raw bytea, primary key (at, degrees))"
    )
    watch(queue, "sales.readings")
    write = """
        insert into sales.readings select '2030-01-01 12:00+00', d, '1 day 2 hours', '\\xff' from unnest('{1.0000001,1.0000002}'::float8[]) d;
        update sales.readings set span = '3 hours';
        delete from sales.readings
    """
    found, keys = changes(queue, write), queue.column("select ordering_key from ulak.queue order by id")
    for setting in (
        "timezone = 'Asia/Tokyo'",
        "datestyle = 'German'",
        "intervalstyle = 'iso_8601'",
        "extra_float_digits = -15",
        "bytea_output = 'escape'",
    ):
        queue.db.execute(f"set local {setting}")

    again = changes(queue, write)

    assert len(found) == 6
    assert again == found
    assert queue.column("select ordering_key from ulak.queue order by id") == keys * 2
