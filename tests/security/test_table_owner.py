"""What writers, owners of watched tables and administrators of ulak can make of a watch."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.queue import DB, Queue


@pytest.fixture
def world(db: DB) -> Queue:
    """A table of test_ulak_admin's, which nobody may write to."""
    queue = Queue(db)
    queue.endpoint("shop")
    queue.call("create_event_type", "order.changed")
    queue.call("subscribe", "order.changed", "shop")
    db.execute("create schema sales authorization test_ulak_admin")
    db.execute("grant usage on schema sales to public")
    return queue


@pytest.fixture
def admin(world: Queue, connect: Connect) -> DB:
    session: DB = connect("test_ulak_admin")
    session.execute("create table sales.orders (id bigint primary key, status text)")
    session.execute("grant insert, update (status), delete, select on sales.orders to nobody")
    return session


def test_a_writer_needs_no_right_on_ulak_and_is_recorded_as_the_sender(
    world: Queue, admin: DB, connect: Connect
) -> None:
    admin.execute("select ulak.watch('sales.orders', 'order.changed')")
    # Even if endpoint and event type are granted to others.
    admin.execute("select ulak.grant_endpoint('shop', 'test_ulak_application', 'send')")
    admin.execute("select ulak.grant_event_type('order.changed', 'test_ulak_application')")
    nobody = connect("nobody")

    nobody.execute("insert into sales.orders values (1, 'new')")

    assert world.rows("select sent_by, payload -> 'new' as new from ulak.queue") == [
        {"sent_by": "nobody", "new": {"id": 1, "status": "new"}}
    ]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        nobody.execute("select ulak.publish('order.changed', '{}')")


def test_an_administrator_watches_no_table_that_he_has_no_rights_on(world: Queue, db: DB, connect: Connect) -> None:
    db.execute("create table sales.salaries (id int primary key, salary int)")
    admin = connect("test_ulak_admin")
    watch = "select ulak.watch('sales.salaries', 'order.changed', p_columns => '{id}')"

    for grant in ("select on sales.salaries", "trigger, select (id) on sales.salaries"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            admin.execute(watch)
        db.execute(f"revoke all on sales.salaries from test_ulak_admin; grant {grant} to test_ulak_admin")
    admin.execute(watch)

    for refused in (
        "select ulak.watch('sales.salaries', 'order.changed')",
        "select ulak.watch('sales.salaries', 'order.changed', p_columns => '{id}', p_condition => '$.new.salary > 5')",
        "select ulak.watch('sales.salaries', 'order.changed', p_columns => '{id}', p_ordering_key => '{salary}')",
        "select ulak.watch('sales.salaries', 'order.changed', p_columns => '{id}', p_changed => '{salary}')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match='column "salary" of table'):
            admin.execute(refused)  # type: ignore[arg-type]
    assert world.value("select count(*) from ulak.watches") == 1


def test_the_ordering_key_holds_no_primary_key_that_its_creator_may_not_read(
    world: Queue, db: DB, connect: Connect
) -> None:
    db.execute("create table sales.patients (insurance text primary key, ward text)")
    db.execute("grant trigger, select (ward) on sales.patients to test_ulak_admin")
    admin = connect("test_ulak_admin")

    with pytest.raises(psycopg.errors.InsufficientPrivilege, match='column "insurance" of table'):
        admin.execute("select ulak.watch('sales.patients', 'order.changed', p_columns => '{ward}')")
    admin.execute(
        "select ulak.watch('sales.patients', 'order.changed', p_columns => '{ward}', p_ordering_key => '{ward}')"
    )
    db.execute("insert into sales.patients values ('number', 'north')")

    assert world.column("select ordering_key from ulak.queue") == ["north"]


def test_an_administrator_ends_a_watch_of_a_table_that_he_does_not_own(world: Queue, db: DB, connect: Connect) -> None:
    db.execute("create table sales.salaries (id int primary key)")
    db.execute("select ulak.watch('sales.salaries', 'order.changed')")

    connect("test_ulak_admin").execute("select ulak.unwatch(id) from ulak.watch_list")
    db.execute("insert into sales.salaries values (1)")

    assert world.value("select count(*) from ulak.queue") == 0


@pytest.mark.parametrize("role", ["nobody", "test_ulak_application", "test_ulak_monitor", "test_ulak_consumer"])
def test_a_table_owner_without_ulak_admin_can_not_watch(world: Queue, db: DB, connect: Connect, role: str) -> None:
    db.execute("create table sales.own (id int primary key)")
    db.execute(f"alter table sales.own owner to {role}")
    owner = connect(role)

    for statement in (
        "select ulak.watch('sales.own', 'order.changed')",
        "create trigger t after insert on sales.own referencing new table as new_rows"
        " for each statement execute function ulak_private.publish_changes('1')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            owner.execute(statement)  # type: ignore[arg-type]


EVIL = """
    create table sales.seen (who text);
    grant insert on sales.seen to public;
    create type sales.mood as enum ('good');
    create type sales.pair as (a sales.mood, b int);
    create domain sales.moods as sales.mood;
    create function sales.evil(sales.mood) returns json language plpgsql as
        $$ begin insert into sales.seen values (current_user); return '1'; end $$;
    create function sales.evil(sales.pair) returns json language plpgsql as
        $$ begin insert into sales.seen values (current_user); return '1'; end $$;
    create function sales.evil_text(sales.mood) returns text language plpgsql as
        $$ begin insert into sales.seen values (current_user); return '1'; end $$;
    create cast (sales.mood as json) with function sales.evil(sales.mood);
    create cast (sales.pair as json) with function sales.evil(sales.pair);
    create cast (sales.mood as text) with function sales.evil_text(sales.mood) as implicit;
"""


# What an administrator puts where publish_changes() would look for the rows that have changed, and triggers that let it look there.
TRAP = """
    create function sales.note() returns bigint language plpgsql volatile as
        $$ begin raise exception 'as %', current_user using errcode = 'XX999'; end $$;
    grant execute on function sales.note() to public;
"""
NAMES = ("old_rows", "new_rows", "ulak_old_rows", "ulak_new_rows")
WRITES = {
    "insert": "insert into sales.trap values (2, 'new')",
    "update": "update sales.trap set status = 'other'",
    "delete": "delete from sales.trap",
}
OWN = "create or replace trigger {name} after {operation} on sales.trap {referencing} for each statement execute function ulak_private.publish_changes({id})"
REFERENCING = {
    "insert": "referencing new table as ulak_new_rows",
    "update": "referencing old table as ulak_old_rows new table as ulak_new_rows",
    "delete": "referencing old table as ulak_old_rows",
}


@pytest.fixture
def trapper(admin: DB) -> DB:
    """An administrator whose temporary views have the names of transition tables, and call a function of its own."""
    admin.execute(TRAP)
    admin.execute("create table sales.trap (id bigint primary key, status text)")
    admin.execute("insert into sales.trap values (1, 'first')")
    for name in NAMES:
        admin.execute(f"create temporary view {name} as select sales.note() as id, 'x'::text as status")  # type: ignore[arg-type]
    return admin


def sqlstate(session: DB, statement: str) -> str | None:
    """Of its error; None without one."""
    try:
        session.execute(statement)  # type: ignore[arg-type]
    except psycopg.Error as error:
        return error.sqlstate
    return None


def test_the_trap_is_one(trapper: DB) -> None:
    assert sqlstate(trapper, "select id from ulak_old_rows") == "XX999"


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize("is_own", [True, False], ids=["own watch", "another one's watch"])
def test_a_trigger_that_watch_has_not_made_reads_no_relation_of_the_session(
    world: Queue, trapper: DB, operation: str, is_own: bool
) -> None:
    table = "sales.trap" if is_own else "sales.orders"
    (id,) = trapper.execute("select ulak.watch(%s, 'order.changed')", [table]).fetchone() or (None,)
    name = f"ulak_watch_{id}_{operation}"
    if is_own:
        trapper.execute(f"drop trigger {name} on sales.trap")  # type: ignore[arg-type]
    trapper.execute(OWN.format(name=name, operation=operation, referencing="", id=id))  # type: ignore[arg-type]

    assert sqlstate(trapper, WRITES[operation]) != "XX999"


@pytest.mark.parametrize("operation", ["update", "delete"])
def test_a_trigger_that_is_replaced_while_its_statement_runs_reads_no_relation_of_the_session(
    world: Queue, trapper: DB, operation: str
) -> None:
    """pg_trigger then shows transition tables that the trigger which fires hasn't got."""
    (id,) = trapper.execute("select ulak.watch('sales.trap', 'order.changed')").fetchone() or (None,)
    name = f"ulak_watch_{id}_{operation}"
    replace = OWN.format(name=name, operation=operation, referencing=REFERENCING[operation], id=id)
    trapper.execute(f"drop trigger {name} on sales.trap")  # type: ignore[arg-type]
    trapper.execute(OWN.format(name=name, operation=operation, referencing="", id=id))  # type: ignore[arg-type]
    trapper.execute(
        f"create function sales.replace() returns boolean language plpgsql as $$ begin {replace}; return true; end $$"  # type: ignore[arg-type]
    )

    assert sqlstate(trapper, f"{WRITES[operation]} where sales.replace()") != "XX999"


def test_a_trigger_of_watch_goes_on_beside_temporary_relations_of_any_other_name(world: Queue, admin: DB) -> None:
    admin.execute("select ulak.watch('sales.orders', 'order.changed')")
    admin.execute("create temporary table new_rows (id int)")

    admin.execute("insert into sales.orders values (1, 'new')")

    assert world.value("select count(*) from ulak.queue") == 1


def test_a_trigger_of_another_table_publishes_nothing_for_a_watch(world: Queue, admin: DB) -> None:
    (id,) = admin.execute("select ulak.watch('sales.orders', 'order.changed')").fetchone() or (None,)
    admin.execute("create table sales.trap (id bigint primary key, status text)")
    trigger = OWN.format(name=f"ulak_watch_{id}_insert", operation="insert", referencing=REFERENCING["insert"], id=id)
    admin.execute(trigger)  # type: ignore[arg-type]

    admin.execute("insert into sales.trap values (1, 'forged')")

    assert world.value("select count(*) from ulak.queue") == 0
    assert world.column("select table_name from ulak.watch_list") == ["sales.orders"]


HIDDEN = """
    alter table sales.secrets enable row level security;
    create policy none on sales.secrets to test_ulak_admin using (false);
    grant trigger, select on sales.secrets to test_ulak_admin;
"""


def test_a_table_whose_rows_are_hidden_from_an_administrator_is_not_watched_by_it(
    world: Queue, db: DB, admin: DB
) -> None:
    db.execute("create table sales.secrets (id bigint primary key, what text)")
    db.execute(HIDDEN)
    document = {"watches": [{"table": "sales.secrets", "event_type": "order.changed"}]}

    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row security hides rows"):
        admin.execute("select ulak.watch('sales.secrets', 'order.changed')")
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        admin.execute("select * from ulak.apply(%s)", [Jsonb(document)])
    assert "row security hides rows" in str(refused.value.diag.message_detail)
    # Row security hides nothing from a superuser.
    db.execute("select ulak.watch('sales.secrets', 'order.changed')")
    assert world.value("select count(*) from ulak.watches") == 1


def test_a_watch_needs_the_right_to_read_of_who_runs_it_and_of_who_asked_for_it(
    world: Queue, db: DB, admin: DB
) -> None:
    """A function of an administrator's, called by a superuser, doesn't lend it the superuser's eyes."""
    db.execute("create table sales.salaries (id int primary key, salary int)")
    db.execute("grant trigger on sales.salaries to test_ulak_admin")
    admin.execute(
        "create function sales.lure() returns bigint language sql security definer"
        " begin atomic select ulak.watch('sales.salaries', 'order.changed'); end"
    )

    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not be read"):
        db.execute("select sales.lure()")

    assert world.value("select count(*) from ulak.watches") == 0


def test_apply_makes_a_watch_only_where_its_caller_may_create_triggers(world: Queue, db: DB, admin: DB) -> None:
    db.execute("create table sales.salaries (id int primary key, salary int)")
    db.execute("grant select on sales.salaries to test_ulak_admin")
    document = {"watches": [{"table": "sales.salaries", "event_type": "order.changed"}]}

    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        admin.execute("select * from ulak.apply(%s)", [Jsonb(document)])

    assert "permission denied for table salaries" in str(refused.value.diag.message_detail)
    assert world.value("select count(*) from ulak.watches") == 0


def test_a_cast_of_the_tables_owner_does_not_run_with_the_rights_of_ulak(world: Queue, admin: DB) -> None:
    admin.execute(EVIL)
    admin.execute(
        "create table sales.kinds (id sales.mood primary key, m sales.mood, ms sales.mood[], p sales.pair, ps sales.pair[],"
        " d sales.moods, t text)"
    )
    admin.execute(
        "select ulak.watch('sales.kinds', 'order.changed', p_ordering_key => '{m,p}', p_changed => '{m,t,p}',"
        """ p_condition => '$.new.t != "never"')"""
    )
    # Also a column that gets such a type later.
    admin.execute("alter table sales.kinds alter t type sales.mood using t::sales.mood")

    admin.execute(
        "insert into sales.kinds values ('good', 'good', '{good}', '(good,1)', '{\"(good,1)\"}', 'good', 'good')"
    )
    admin.execute("update sales.kinds set p = '(good,2)'")

    assert world.column("select who from sales.seen") == []
    sent: list[Any] = world.column("select payload -> 'new' from ulak.queue order by id")
    assert [each["p"] for each in sent] == ["(good,1)", "(good,2)"]
    assert sent[0]["m"] == sent[0]["t"] == sent[0]["d"] == "good"


def test_a_cast_of_a_type_inside_of_a_trusted_one_does_not_run_either(world: Queue, admin: DB) -> None:
    admin.execute(EVIL)
    admin.execute("grant usage on schema sales to public")
    world.db.execute("create type public.tag as (mood sales.mood, note text)")
    world.db.execute("create type public.tags as (first public.tag)")
    admin.execute("create table sales.kinds (id int primary key, t public.tag, ts public.tags[])")
    admin.execute("select ulak.watch('sales.kinds', 'order.changed')")

    admin.execute("insert into sales.kinds values (1, ('good', 'a'), array[row(row('good', 'b'))]::public.tags[])")

    assert world.column("select who from sales.seen") == []
    assert world.column("select payload -> 'new' ->> 't' from ulak.queue") == ["(good,a)"]


def test_names_in_the_way_change_nothing(world: Queue, admin: DB) -> None:
    admin.execute("select ulak.watch('sales.orders', 'order.changed')")
    admin.execute("create table sales.new_rows (id int)")
    admin.execute("set search_path = sales")
    admin.execute("create function sales.to_jsonb(anyelement) returns jsonb language sql as $$ select '1'::jsonb $$")

    admin.execute("insert into orders values (1, 'new')")

    assert world.column("select payload -> 'new' from ulak.queue") == [{"id": 1, "status": "new"}]
