"""Archived messages can be sent again: one, or all of an endpoint and a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL
from support.cluster import Connect
from support.finished import column, finish, value
from support.messages import insert_messages
from support.queue import Queue
from support.sessions import Running, wait_until_blocked

DB = psycopg.Connection[Any]

JANUARY = datetime(2030, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2030, 2, 1, tzinfo=UTC)
NOW = datetime(2030, 6, 1, tzinfo=UTC)


@pytest.fixture(scope="module", autouse=True)
def shop(module_session: DB) -> None:
    add_endpoint(module_session)


def add_endpoint(db: DB, name: str = "shop") -> Any:
    return value(db, "select ulak.create_endpoint(%s, 'pull', '{}')", name)


def archived(db: DB, count: int = 1, *, at: datetime = JANUARY, **options: Any) -> list[int]:
    return finish(db, count, at=at, **options)


def replay(db: DB, archive_id: int, **options: Any) -> Any:
    arguments = ", ".join(f"{name} => %({name})s" for name in options)
    query = f"select ulak.replay_message(%(id)s{', ' + arguments if options else ''})"
    return (db.execute(query, {"id": archive_id, **options}).fetchone() or [None])[0]  # type: ignore[arg-type]


def replay_range(db: DB, start: datetime = JANUARY, end: datetime = FEBRUARY, endpoint: int = 1, **options: Any) -> Any:
    arguments = "".join(f", {name} => %({name})s" for name in options)
    query = f"select ulak.replay_range(%(endpoint)s, %(start)s, %(end)s{arguments})"
    parameters = {"endpoint": endpoint, "start": start, "end": end, **options}
    return (db.execute(query, parameters).fetchone() or [None])[0]  # type: ignore[arg-type]


def payloads(db: DB) -> list[int]:
    return column(db, "select (payload -> 'n')::integer from ulak.queue where status = 'pending' order by id")


def test_a_replayed_message_is_a_new_one_with_the_old_content(alone: DB) -> None:
    (id,) = insert_messages(
        alone,
        table="archived",
        created_at=JANUARY,
        endpoint_id=1,
        status="completed",
        attempts=3,
        retry_count=2,
        priority=5,
        correlation_id=SQL("gen_random_uuid()"),
        generation=9,
        last_error="[RETRYABLE] no",
        headers={"x-a": "b"},
        metadata={"c": 3},
        sent_by="bank",
        max_retries=6,
        response={"d": 4},
        idempotency_key="key",
        payload_hash="hash",
        scheduled_at=JANUARY,
        expires_at=JANUARY,
        completed_at=JANUARY,
        locked_by="worker",
        lease_until=JANUARY,
        failure_history=[{"attempts": 7}],
    )
    old = value(alone, "select to_jsonb(a) from ulak.archive a")

    new_id = replay(alone, id, p_now=NOW)

    new = value(alone, "select to_jsonb(q) from ulak.queue q")
    kept = [
        "endpoint_id", "message_id", "priority", "correlation_id", "generation", "payload", "headers", "metadata",
        "sent_by", "max_retries", "failure_history",
    ]  # fmt: skip
    assert {name: new.pop(name) for name in kept} == {name: old[name] for name in kept}
    assert (new.pop("id"), new.pop("made_from")) == (new_id, id)
    assert new.pop("status") == "pending"
    assert {new.pop("attempts"), new.pop("retry_count")} == {0}
    times = {new.pop(name) for name in ("created_at", "updated_at", "next_retry_at")}
    assert times == {NOW.isoformat()}
    assert set(new.values()) == {None}
    assert {"idempotency_key", "expires_at", "scheduled_at", "last_error", "response", "lease_until"} <= set(new)


def test_the_archive_keeps_what_is_replayed(alone: DB) -> None:
    (id,) = archived(alone)

    replay(alone, id)
    replay(alone, id)

    assert column(alone, "select id from ulak.archive") == [id]
    assert payloads(alone) == [1, 1]


def test_a_replay_keeps_the_message_id_unless_a_new_one_is_asked_for(alone: DB) -> None:
    (id,) = archived(alone)
    old = value(alone, "select message_id from ulak.archive")

    same, other = replay(alone, id), replay(alone, id, p_new_message_id=True)

    message_id = "select message_id from ulak.queue where id = %s"
    assert value(alone, message_id, same) == old
    assert value(alone, message_id, other) != old


def test_a_replay_is_of_the_same_event_unless_a_new_message_id_is_asked_for(alone: DB) -> None:
    body = {"payload": {"n": 1}, "metadata": {"m": 2}, "sent_by": "bank", "max_retries": 3}
    headers = {"ulak-event-id": "e", "ulak-event-type": "sold"}
    (id,) = insert_messages(
        alone, table="archived", created_at=JANUARY, endpoint_id=1, status="completed", headers=headers, **body
    )

    same, other = replay(alone, id), replay(alone, id, p_new_message_id=True)
    # From the event of the second one, in another month.
    alone.execute("select ulak.cancel(%s)", [other])
    again, third = replay(alone, other), replay(alone, other, p_new_message_id=True)

    of = "select event_id, event_created_at from ulak_private.deliveries where id = %s"
    assert alone.execute(of, [same]).fetchone() == (id, JANUARY)
    sent_at = value(alone, "select created_at from ulak.archive where id = %s", other)
    assert alone.execute(of, [again]).fetchone() == (other, sent_at)
    assert alone.execute(of, [third]).fetchone() == (third, None)
    # Receivers of CloudEvents drop duplicates by the event's id.
    own = {"ulak-event-type": "sold"}
    for message, expected in ((same, headers), (other, own), (again, own), (third, own)):
        (found,) = alone.execute("select to_jsonb(m) from ulak.messages m where id = %s", [message]).fetchone() or ({},)
        assert {name: found[name] for name in body} == body
        assert found["headers"] == expected


def test_messages_of_a_range_that_get_new_message_ids_have_an_event_each(alone: DB) -> None:
    archived(alone, 3)

    assert replay_range(alone, p_new_message_id=True) == 3

    assert payloads(alone) == [1, 2, 3]
    own = "select event_id = id and event_created_at is null from ulak_private.deliveries"
    assert column(alone, own) == [True] * 3


def test_a_failed_cycle_becomes_part_of_the_history(alone: DB) -> None:
    (id,) = insert_messages(
        alone,
        table="archived",
        created_at=JANUARY,
        endpoint_id=1,
        status="failed",
        attempts=4,
        retry_count=3,
        last_error="[PERMANENT] no",
        first_failed_at=JANUARY,
        failed_at=JANUARY,
        failure_history=[{"attempts": 7}],
    )

    replay(alone, id, p_now=NOW)

    first, second = value(alone, "select failure_history from ulak.queue")
    assert first == {"attempts": 7}
    assert (second["attempts"], second["retry_count"], second["last_error"]) == (4, 3, "[PERMANENT] no")
    assert second["first_failed_at"] == second["failed_at"] == JANUARY.isoformat()
    assert (second["redriven_by"], second["redriven_at"]) == ("postgres", NOW.isoformat())


def test_a_replay_is_in_the_event_log(alone: DB) -> None:
    (id,) = archived(alone)

    new_id = replay(alone, id)

    logged = (
        "select endpoint_id, endpoint_name, message_id, detail from ulak.event_log where event = 'message.replayed'"
    )
    assert alone.execute(logged).fetchall() == [(1, "shop", new_id, {"archive_id": id, "new_message_id": False})]


def test_a_message_that_is_not_archived_is_an_error_that_says_where_it_is(alone: DB) -> None:
    alone.execute("insert into ulak_private.deliveries (id, endpoint_id, event_id) values (5, 1, 0)")
    found = {}
    for id in (4, 5):
        with pytest.raises(psycopg.errors.NoDataFound) as caught, alone.transaction():
            replay(alone, id)
        found[id] = (caught.value.diag.message_detail, caught.value.diag.message_hint)

    assert "no such message" in (found[4][0] or "")
    assert "in the queue, pending" in (found[5][0] or "")
    assert all(hint for _, hint in found.values())


def test_messages_of_a_dropped_endpoint_cannot_be_replayed(alone: DB) -> None:
    gone = add_endpoint(alone, "gone")
    (id,) = archived(alone, endpoint_id=gone)
    alone.execute("select ulak.drop_endpoint('gone')")

    for call in (lambda: replay(alone, id), lambda: replay_range(alone, endpoint=gone)):
        with pytest.raises(psycopg.errors.UndefinedObject, match="does not exist"), alone.transaction():
            call()

    assert payloads(alone) == []


def test_a_range_is_called_as_users_know_it(alone: DB) -> None:
    archived(alone, 2)
    archived(alone, 3, status="failed")

    named = """
        select ulak.replay_range(
            p_endpoint_id := 1, p_from_ts := '2030-01-01'::timestamptz, p_to_ts := '2030-01-31'::timestamptz
        )
    """
    assert value(alone, named) == 5
    assert value(alone, "select ulak.replay_range(1, '2030-01-01', '2030-01-31', 'failed')") == 3


def test_a_range_includes_its_start_and_not_its_end(alone: DB) -> None:
    instant = timedelta(microseconds=1)
    ids = [archived(alone, at=at)[0] for at in (JANUARY - instant, JANUARY, FEBRUARY - instant, FEBRUARY)]

    assert replay_range(alone) == 2

    logged = value(alone, "select detail from ulak.event_log where event = 'messages.replayed'")
    assert (logged["first_archive_id"], logged["last_archive_id"]) == (ids[1], ids[2])


def test_a_range_is_of_one_endpoint_and_of_one_status_if_given(alone: DB) -> None:
    other = add_endpoint(alone, "other")
    archived(alone, 1)
    archived(alone, 2, status="expired")
    archived(alone, 4, status="failed")
    archived(alone, 8, endpoint_id=other)

    assert replay_range(alone, p_dry_run=True) == 7
    assert replay_range(alone, p_status="expired") == 2
    assert column(alone, "select distinct endpoint_id from ulak.queue") == [1]


def test_a_limit_takes_the_oldest_and_the_old_order_is_kept(alone: DB) -> None:
    archived(alone, 20)

    assert replay_range(alone, p_limit=7) == 7

    assert payloads(alone) == [1, 2, 3, 4, 5, 6, 7]


def test_a_dry_run_counts_and_changes_nothing(alone: DB) -> None:
    archived(alone, 3)

    assert replay_range(alone, p_dry_run=True) == 3
    assert replay_range(alone, p_dry_run=True, p_limit=2) == 2

    assert payloads(alone) == []
    assert value(alone, "select count(*) from ulak.event_log where event = 'messages.replayed'") == 0


def test_a_range_is_logged_once(alone: DB) -> None:
    archived(alone, 3)

    replay_range(alone, p_status="completed", p_new_message_id=True)
    replay_range(alone, p_status="failed")

    events = "select endpoint_name, detail from ulak.event_log where event = 'messages.replayed'"
    ((name, detail),) = alone.execute(events).fetchall()
    assert (name, detail["messages"], detail["status"], detail["new_message_id"]) == ("shop", 3, "completed", True)
    assert detail["last_id"] - detail["first_id"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"start": FEBRUARY, "end": JANUARY},
        {"start": JANUARY, "end": JANUARY},
        {"p_status": "pending"},
        {"p_status": "done"},
        {"p_limit": 0},
        {"p_limit": -1},
    ],
    ids=str,
)
def test_a_nonsensical_range_is_refused(alone: DB, options: dict[str, Any]) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), alone.transaction():
        replay_range(alone, **options)


def test_a_range_without_an_end_is_refused(alone: DB) -> None:
    with pytest.raises(psycopg.errors.NullValueNotAllowed), alone.transaction():
        alone.execute("select ulak.replay_range(1, null, '2030-01-01')")


def test_a_replay_that_would_overflow_the_queue_is_refused_as_a_whole(db: DB) -> None:
    # A database of its own: how far the queue has room is remembered, also after a rollback.
    add_endpoint(db)
    archived(db, 11)
    db.execute("select ulak.configure('max_queue_size', '10')")

    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        replay_range(db)

    assert payloads(db) == []
    assert replay_range(db, p_limit=10) == 10
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        replay_range(db, p_limit=1)


def test_a_replay_of_one_month_reads_one_partition(alone: DB) -> None:
    alone.execute("select ulak.maintain_archive_partitions(9, %s)", [JANUARY])
    for number in range(1, 11):
        archived(alone, 20, at=datetime(2030, number, 5, tzinfo=UTC))
    scans = """
        select relname::text, coalesce(seq_scan, 0) + coalesce(idx_scan, 0)
        from pg_stat_xact_all_tables where schemaname = 'ulak_private' and relname ~ '^archive_'
    """
    before = dict(alone.execute(scans).fetchall())

    assert replay_range(alone, datetime(2030, 4, 1, tzinfo=UTC), datetime(2030, 5, 1, tzinfo=UTC)) == 20

    after = dict(alone.execute(scans).fetchall())
    assert [name for name in sorted(after) if after[name] > before.get(name, 0)] == ["archive_2030_04"]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_replay_reads_each_message_a_few_times_whatever_the_statistics_say(db: DB, is_new: bool) -> None:
    """Without statistics the planner would go through the month once per message."""
    add_endpoint(db)
    db.execute("select ulak.maintain_archive_partitions(0, %s)", [JANUARY])
    for table in ("archive", "events"):
        db.execute(f"alter table ulak_private.{table}_2030_01 set (autovacuum_enabled = off)")  # type: ignore[arg-type]
    archived(db, 20_000)

    with db.transaction():
        assert replay_range(db, p_limit=200, p_new_message_id=is_new) == 200
        read = dict(
            db.execute(
                "select relname::text, seq_tup_read + idx_tup_fetch from pg_stat_xact_all_tables where relname ~ '_2030_01$'"
            ).fetchall()
        )

    # The month once, to find them.
    assert read["archive_2030_01"] <= 20_000 + 4 * 200
    assert read["events_2030_01"] <= 4 * 200


def test_replayed_messages_of_a_key_go_one_by_one_behind_those_that_wait(alone: DB) -> None:
    archived(alone, 2, ordering_key="k")
    alone.execute("select ulak.send('shop', '{\"n\": 0}', p_ordering_key => 'k')")

    assert replay_range(alone) == 2

    delivered = []
    while claim := alone.execute("select id, attempt, payload from ulak.claim('w', 10, 'shop')").fetchall():
        ((id, attempt, payload),) = claim
        delivered.append(payload["n"])
        alone.execute("select ulak.complete(%s, 'w', %s)", [id, attempt])
    assert delivered == [0, 1, 2]


def test_a_replayed_head_of_a_key_is_due_at_once(alone: DB) -> None:
    (id,) = archived(alone, ordering_key="k")

    new_id = replay(alone, id)

    assert column(alone, "select id from ulak.claim('w', 10, 'shop')") == [new_id]


def test_a_replay_of_many_keys_takes_no_room_in_the_servers_lock_table(alone: DB) -> None:
    archived(alone, 1700, ordering_key=SQL("'key ' || n"))

    with alone.transaction():
        assert replay_range(alone) == 1700
        assert value(alone, "select count(*) from pg_locks where pid = pg_backend_pid()") < 200

    assert value(alone, "select count(*) from ulak_private.ordering_keys") == 1700


def test_a_replay_waits_for_a_sender_of_the_same_key(db: DB, connect: Connect) -> None:
    """Otherwise the sender's message, with the lower id, could be committed after the replayed one was delivered."""
    add_endpoint(db)
    (id,) = archived(db, ordering_key="k")
    sender, operator = connect(autocommit=False), connect()
    sent = value(sender, "select ulak.send('shop', '{}', p_ordering_key => 'k')")

    waiting = Running(lambda: replay(operator, id))
    wait_until_blocked(operator, db)
    sender.commit()

    assert waiting.result() > sent
    assert column(db, "select id from ulak.claim('w', 10, 'shop')") == [sent]


def test_an_endpoint_cannot_be_dropped_under_a_replay(db: DB, connect: Connect) -> None:
    add_endpoint(db)
    (id,) = archived(db)
    operator = connect(autocommit=False)
    replay(operator, id)

    with pytest.raises(psycopg.Error, match="shop"):
        db.execute("select ulak.drop_endpoint('shop')")

    operator.commit()
    assert value(db, "select count(*) from ulak.endpoints") == 1


# Each message once, however many times it went round.


EVERYTHING = ("-infinity", "infinity")


def bury(queue: Queue, payload: Any) -> tuple[int, int]:
    """The ids of a message and of its dead letter."""
    id = queue.send(payload=payload)
    return id, queue.bury(id)


def deliver(queue: Queue) -> None:
    for claim in queue.claim(100, now=10):
        queue.complete(claim, now=11)


def test_a_message_whose_dead_letter_was_redriven_is_replayed_once(queue: Queue) -> None:
    queue.endpoint()
    _, letter = bury(queue, {"n": 1})
    queue.call("redrive_message", letter)
    deliver(queue)
    assert queue.column("select status from ulak.archive order by id") == ["failed", "completed"]

    assert queue.call("replay_range", "shop", *EVERYTHING, dry_run=True) == 1
    assert queue.call("replay_range", "shop", *EVERYTHING) == 1
    assert queue.column("select payload from ulak.queue") == [{"n": 1}]


def test_a_message_whose_redriven_copy_is_under_way_is_not_replayed(queue: Queue) -> None:
    queue.endpoint()
    _, letter = bury(queue, {"n": 1})
    queue.call("redrive_message", letter)

    assert queue.call("replay_range", "shop", *EVERYTHING, status="failed") == 0


def test_once_although_the_dead_letter_is_deleted(queue: Queue) -> None:
    queue.endpoint()
    _, letter = bury(queue, {"n": 1})
    queue.call("redrive_message", letter)
    deliver(queue)
    queue.db.execute("delete from ulak.dlq")

    assert queue.call("replay_range", "shop", *EVERYTHING) == 1


def test_what_was_replayed_before_is_replayed_once(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(3)
    deliver(queue)

    for _ in range(3):
        assert queue.call("replay_range", "shop", *EVERYTHING) == 3
        deliver(queue)


def test_a_discarded_letter_is_not_replayed_with_a_range_but_by_itself(queue: Queue) -> None:
    queue.endpoint()
    id, _ = bury(queue, {"n": 1})
    bury(queue, {"n": 2})
    queue.rows("select * from ulak.discard('shop', p_filter => '$ ? (@.n == 1)')")

    assert queue.call("replay_range", "shop", *EVERYTHING) == 1
    assert queue.column("select payload from ulak.queue") == [{"n": 2}]
    assert queue.status(queue.call("replay_message", id)) == "pending"


def test_a_range_by_the_name_of_its_endpoint(queue: Queue) -> None:
    id = queue.endpoint()
    queue.send()
    deliver(queue)

    assert queue.call("replay_range", "shop", *EVERYTHING, dry_run=True) == 1
    assert queue.call("replay_range", id, *EVERYTHING, dry_run=True) == 1
    assert queue.refuses("replay_range", "shpo", *EVERYTHING).message_hint == 'Did you mean "shop"?'


def test_a_range_goes_to_another_endpoint(queue: Queue) -> None:
    queue.endpoint()
    other = queue.endpoint("other")
    queue.send(payload={"n": 1}, ordering_key="k")
    deliver(queue)
    _, letter = bury(queue, {"n": 2})

    assert queue.call("replay_range", "shop", *EVERYTHING, to="other", dry_run=True) == 2
    assert queue.call("replay_range", "shop", *EVERYTHING, to="other") == 2

    assert queue.rows("select endpoint_id, payload, ordering_key from ulak.queue order by id") == [
        {"endpoint_id": other, "payload": {"n": 1}, "ordering_key": "k"},
        {"endpoint_id": other, "payload": {"n": 2}, "ordering_key": None},
    ]
    # Its own endpoint hasn't got it.
    assert queue.value("select status from ulak.dlq where id = %s", letter) == "failed"
    assert queue.value("select detail ->> 'endpoint' from ulak.event_log where event = 'messages.replayed'") == "other"
    assert queue.refuses("replay_range", "shop", *EVERYTHING, to="othr").message_hint == 'Did you mean "other"?'


def test_a_plan_of_a_replay_counts_shows_a_sample_and_names_the_command(queue: Queue) -> None:
    queue.endpoint()
    queue.endpoint("other")
    for n in range(7):
        queue.send(payload={"n": n})
    deliver(queue)

    (plan,) = queue.rows(
        "select * from ulak.replay_plan('shop', '-infinity', 'infinity', p_to => 'other', p_filter => '$.n > 0')"
    )

    assert (plan["messages"], [each["payload"] for each in plan["sample"]]) == (6, [{"n": n} for n in range(1, 6)])
    assert queue.value("select count(*) from ulak.queue") == 0
    assert queue.rows(plan["command"]) == [{"replay_range": 6}]
    assert queue.refuses("replay_plan", "shop", *EVERYTHING, to="othr").sqlstate == "42704"


def test_a_filter_picks_what_is_replayed(queue: Queue) -> None:
    queue.endpoint()
    for n in range(4):
        queue.send(payload={"n": n})
    deliver(queue)

    assert queue.call("replay_range", "shop", *EVERYTHING, filter="$.n > 1") == 2
    assert queue.column("select payload -> 'n' from ulak.queue order by id") == [2, 3]


def test_a_replay_of_a_dead_letter_counts_as_its_redrive(queue: Queue) -> None:
    queue.endpoint()
    id, letter = bury(queue, {"n": 1})

    new_id = queue.call("replay_message", id, now=queue.at(50))

    (row,) = queue.rows("select status, redriven_by, redriven_at, redriven_message_id from ulak.dlq")
    assert tuple(row.values()) == ("redriven", "postgres", queue.at(50), new_id)
    assert queue.refuses("redrive_message", letter).sqlstate == "55000"
    assert queue.call("redrive_all") == 0
    assert queue.call("replay_range", "shop", *EVERYTHING, status="failed") == 0
    assert queue.column("select id from ulak.queue") == [new_id]


def test_a_replayed_range_marks_the_letters_of_its_messages(queue: Queue) -> None:
    queue.endpoint()
    for n in range(3):
        bury(queue, {"n": n})

    assert queue.call("replay_range", "shop", *EVERYTHING) == 3

    letters = queue.column(
        "select redriven_message_id from ulak.dlq where status = 'redriven' order by original_message_id"
    )
    assert letters == queue.column("select id from ulak.queue order by id")
    assert queue.call("redrive_all") == 0


def test_a_letter_that_was_redriven_or_replayed_is_not_replayed(queue: Queue) -> None:
    queue.endpoint()
    redriven, letter = bury(queue, {"n": 1})
    discarded, _ = bury(queue, {"n": 2})
    new_id = queue.call("redrive_message", letter)
    queue.rows("select * from ulak.discard('shop', p_filter => '$ ? (@.n == 2)')")
    queue.call("replay_message", discarded)

    error = queue.refuses("replay_message", redriven)

    assert (error.sqlstate, error.message_hint) == ("55000", f"select * from ulak.explain({new_id});")
    assert queue.refuses("replay_message", discarded).sqlstate == "55000"
    assert queue.column("select payload from ulak.queue order by id") == [{"n": 1}, {"n": 2}]


def test_a_header_that_is_not_a_messages_to_set_at_another_endpoint_stays_behind(queue: Queue) -> None:
    """The event of the first message is as it was sent."""
    queue.endpoint("shop")
    queue.endpoint("bus", {"url": "nats://broker.test", "subject": "orders"}, protocol="nats")
    queue.send("shop", headers={"Nats-Rollup": "all", "x-a": "b"})
    queue.send("shop", headers={"x-a": "c"})
    for claim in queue.claim(2):
        queue.complete(claim)

    assert queue.value("select ulak.replay_range('shop', '-infinity', 'infinity', p_to => 'bus')") == 2

    assert queue.column("select headers from ulak.queue order by id") == [{"x-a": "b"}, {"x-a": "c"}]
    assert queue.column("select headers -> 'Nats-Rollup' from ulak.archive order by id") == ["all", None]
    # Only what had to be changed was copied.
    assert queue.value("select count(*) from ulak_private.events") == 3


@pytest.mark.parametrize("is_new", [False, True])
def test_a_replay_of_a_message_whose_event_somebody_deleted_makes_no_other(queue: Queue, is_new: bool) -> None:
    queue.endpoint("shop")
    id = queue.send("shop")
    queue.complete(queue.claim_one())
    queue.db.execute("delete from ulak_private.events")

    new_id = queue.call("replay_message", id, new_message_id=is_new)

    assert queue.rows("select id, payload from ulak.queue") == [{"id": new_id, "payload": None}]
    assert queue.value("select count(*) from ulak_private.events") == 0
