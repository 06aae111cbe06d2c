"""Sending: what each option stores, what is refused and how, and what a send does not do."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.queue import DB, Queue

CONVERSATION = UUID("5f0c1a52-9f3a-4c39-9c6b-0d9f1f3f7a11")
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)
NEVER = "infinity"


@pytest.fixture(autouse=True)
def shop(request: pytest.FixtureRequest) -> None:
    if "queue" in request.fixturenames:
        request.getfixturevalue("queue").endpoint("shop")


def count(queue: Queue) -> int:
    return int(queue.value("select count(*) from ulak.queue"))


# What is stored.


def test_a_message_waits_in_the_queue_due_at_once(queue: Queue) -> None:
    id = queue.send(payload={"order": 1})

    message = queue.message(id)
    given = {name: value for name, value in message.items() if value is not None}
    assert given.pop("message_id").version == 4
    assert given == {
        "id": id,
        "endpoint_id": queue.value("select id from ulak.endpoints where name = 'shop'"),
        "payload": {"order": 1},
        "status": "pending",
        "priority": 0,
        "attempts": 0,
        "retry_count": 0,
        "failure_history": [],
        "next_retry_at": queue.base,
        "created_at": queue.base,
        "updated_at": queue.base,
        "sent_by": queue.value("select session_user"),
    }


def test_every_option_is_stored(queue: Queue) -> None:
    id = queue.send(
        priority=7,
        scheduled_at=60,
        idempotency_key="once",
        correlation_id=CONVERSATION,
        expires_at=120,
        ordering_key="customer 1",
        headers={"x-tenant": "a\tb"},
        metadata={"by": ["me"]},
    )

    message = queue.message(id)
    assert message["priority"] == 7
    assert message["scheduled_at"] == message["next_retry_at"] == queue.at(60)
    assert message["idempotency_key"] == "once"
    assert message["correlation_id"] == CONVERSATION
    assert message["expires_at"] == queue.at(120)
    assert message["ordering_key"] == "customer 1"
    assert message["headers"] == {"x-tenant": "a\tb"}
    assert message["metadata"] == {"by": ["me"]}


def test_options_can_be_given_by_position(queue: Queue) -> None:
    options = [7, queue.at(60), "once", CONVERSATION, queue.at(120), "customer 1"]

    by_position = queue.message(queue.call("send_with_options", "shop", Jsonb(1), *options))
    again = queue.call("send_with_options", "shop", Jsonb(1), *options)

    names = ("priority", "scheduled_at", "idempotency_key", "correlation_id", "expires_at", "ordering_key")
    assert [by_position[name] for name in names] == options
    assert again == by_position["id"]


def test_options_by_position_may_be_null_or_left_out(queue: Queue) -> None:
    ids = [
        queue.value("select ulak.send_with_options('shop', '1')"),
        queue.value("select ulak.send_with_options('shop', '1', null, null, null, null, null, null)"),
        queue.value("select ulak.send_with_options('shop', '1', 0::smallint)"),
    ]

    assert [queue.message(id)["priority"] for id in ids] == [0, 0, 0]


PLAIN: dict[str, Any] = {"payload": {"n": 1}, "priority": 3, "correlation_id": CONVERSATION}


def test_the_short_way_and_the_long_way_store_the_same(queue: Queue) -> None:
    short = queue.message(queue.send(**PLAIN))
    # An option that says what is the default.
    long = queue.message(queue.call("send", "shop", **PLAIN, if_waiting="keep"))

    own = {"id", "message_id"}
    assert {name: short[name] for name in short.keys() - own} == {name: long[name] for name in long.keys() - own}


def test_every_message_has_an_id_of_its_own(queue: Queue) -> None:
    ids = [queue.send() for _ in range(5)]

    assert ids == sorted(set(ids))
    assert queue.value("select count(distinct message_id) from ulak.queue") == 5


@pytest.mark.parametrize("payload", ["null", "0", '"text"', "[]", "{}", "true", '{"ключ": "\\u2028 ☃"}'])
def test_any_json_value_is_a_payload(queue: Queue, payload: str) -> None:
    id = queue.value("select ulak.send('shop', %s)", payload)

    assert queue.value("select payload = %s::jsonb from ulak.queue where id = %s", payload, id)


def test_a_message_scheduled_in_the_past_is_due_at_once(queue: Queue) -> None:
    message = queue.message(queue.send(scheduled_at=-3600))

    assert message["next_retry_at"] == queue.base
    assert message["scheduled_at"] == queue.at(-3600)


def test_a_scheduled_message_is_claimed_at_its_time(queue: Queue) -> None:
    id = queue.send(scheduled_at=60)

    assert queue.claim(now=59.999) == []
    assert queue.claim_one(now=60).id == id


@pytest.mark.parametrize("length", [1, 512])
def test_a_key_may_have_512_bytes(queue: Queue, length: int) -> None:
    id = queue.send(idempotency_key="k" * length, ordering_key="o" * length)

    assert queue.message(id)["idempotency_key"] == "k" * length
    assert queue.message(id)["ordering_key"] == "o" * length


# Transactions.


def test_a_rolled_back_send_leaves_nothing(db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    with db.transaction(force_rollback=True):
        db.execute("select ulak.send('shop', '1')")
        db.execute("select ulak.send('shop', '1', p_idempotency_key => 'k', p_ordering_key => 'o')")
        db.execute("select ulak.send_batch('shop', '{1,2,3}')")

    for table in ("ulak.queue", "ulak.dlq", "ulak.archive", "ulak_private.ordering_keys", "ulak.endpoint_stats"):
        assert db.execute(f"select count(*) from {table}").fetchone() == (0,)  # type: ignore[arg-type]
    assert db.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)


def test_a_savepoint_takes_back_its_sends_only(queue: Queue) -> None:
    kept = queue.send()
    with queue.db.transaction(force_rollback=True):
        queue.send(ordering_key="o")
        queue.send(idempotency_key="k")

    assert queue.column("select id from ulak.queue") == [kept]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_message_can_be_sent_at_any_isolation_level(connect: Connect, isolation: str) -> None:
    db = connect()
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    with db.transaction():
        db.execute(f"set transaction isolation level {isolation}")  # type: ignore[arg-type]
        db.execute("select ulak.send('shop', '1')")
        db.execute("select ulak.send('shop', '2', p_idempotency_key => 'k') from generate_series(1, 2)")
        db.execute("select ulak.send_batch('shop', '{3,4}')")

    assert [p for (p,) in db.execute("select payload from ulak.queue order by id")] == [1, 2, 3, 4]


# Idempotency.


def test_the_same_key_and_payload_give_the_first_id(queue: Queue) -> None:
    first = queue.send(payload={"a": 1, "b": 2}, idempotency_key="k")

    again = queue.value("""select ulak.send('shop', '{ "b":2, "a":1 }', p_idempotency_key => 'k')""")
    otherwise = queue.send(payload={"a": 1, "b": 2}, idempotency_key="k", priority=9, ordering_key="o")

    assert again == otherwise == first
    assert count(queue) == 1
    assert queue.message(first)["priority"] == 0


def test_the_same_key_twice_in_one_statement_gives_one_id(queue: Queue) -> None:
    ids = queue.column("select ulak.send('shop', '1', p_idempotency_key => 'k') from generate_series(1, 3)")

    assert len(set(ids)) == 1
    assert count(queue) == 1


def test_the_same_key_with_another_payload_is_refused(queue: Queue) -> None:
    first = queue.send(payload={"a": 1}, idempotency_key="k")

    error = queue.refuses("send", "shop", {"a": 2}, idempotency_key="k")

    assert error.sqlstate == "23505"
    assert error.message_primary == 'idempotency key "k" was used for another payload'
    assert error.message_detail == f'Message {first} of endpoint "shop" has this key and a different payload.'
    assert error.message_hint == "Use a new key for a new message, or send the first payload again to get its id."
    assert count(queue) == 1


def test_two_endpoints_may_use_the_same_key(queue: Queue) -> None:
    queue.endpoint("other")

    assert queue.send("shop", 1, idempotency_key="k") != queue.send("other", 2, idempotency_key="k")


def test_a_key_is_taken_while_its_message_is_in_flight_and_after_its_delivery(queue: Queue) -> None:
    first = queue.send(idempotency_key="k")
    claim = queue.claim_one()
    assert queue.send(idempotency_key="k") == first

    queue.complete(claim)

    assert queue.send(idempotency_key="k") == first
    assert queue.refuses("send", "shop", "2", idempotency_key="k").sqlstate == "23505"


def test_a_key_is_free_again_when_its_message_has_failed(queue: Queue) -> None:
    first = queue.send(payload=1, idempotency_key="k")
    queue.fail(queue.claim_one(), permanent=True)

    second = queue.send(payload=2, idempotency_key="k")

    assert second != first
    assert (queue.status(first), queue.status(second)) == ("failed", "pending")


def test_a_key_is_free_again_when_its_message_has_expired(queue: Queue) -> None:
    first = queue.send(payload=1, idempotency_key="k", expires_at=10)
    queue.expire(now=10)

    assert queue.send(payload=2, idempotency_key="k") != first


def test_a_key_of_a_delivered_message_can_be_freed_before_its_time(queue: Queue) -> None:
    first = queue.send(payload=1, idempotency_key="k")
    queue.complete(queue.claim_one())
    queue.call("archive_completed_messages", 0, 1000, now=queue.at(1))

    assert queue.send(payload=2, idempotency_key="k") != first


# Order.


def test_a_message_behind_another_of_its_key_is_parked_by_the_claim_that_meets_it(queue: Queue) -> None:
    queue.endpoint("other")

    ids = [queue.send(ordering_key="a") for _ in range(3)]
    elsewhere = [queue.send(ordering_key="b"), queue.send("other", ordering_key="a"), queue.send()]

    parked = "select id from ulak.queue where next_retry_at = 'infinity' order by id"
    assert queue.column(parked) == []
    assert {claim.id for claim in queue.claim(10)} == {ids[0], *elsewhere}
    assert queue.column(parked) == ids[1:]


def test_the_next_message_of_a_key_is_due_when_the_one_before_is_done(queue: Queue) -> None:
    ids = [queue.send(ordering_key="a"), queue.send(ordering_key="a", scheduled_at=60), queue.send(ordering_key="a")]

    queue.complete(queue.claim_one())

    assert queue.due_in(ids[1]) == 60
    assert queue.claim(now=59) == []
    assert queue.claim_one(now=60).id == ids[1]


def test_a_message_whose_key_has_only_finished_messages_is_due(queue: Queue) -> None:
    queue.send(ordering_key="a")
    queue.complete(queue.claim_one())

    assert queue.due_in(queue.send(ordering_key="a")) == 0


# A receiver never aborts a business transaction.


def test_a_disabled_endpoint_accepts_and_holds(queue: Queue) -> None:
    queue.call("disable_endpoint", "shop")

    ids = [queue.send(), queue.send(idempotency_key="k"), *queue.send_many(2)]

    assert queue.claim(10) == []
    queue.call("enable_endpoint", "shop")
    assert {claim.id for claim in queue.claim(10)} == set(ids)


def test_an_endpoint_with_an_open_circuit_accepts(queue: Queue) -> None:
    queue.db.execute("update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = 'infinity'")

    queue.send()

    assert count(queue) == 1


# What is refused.

OBJECT_HINT = "A name has letters, digits and !#$%&'*+-.^_`|~ only; a value is a text without control characters."
NULL_HINT = "Send the JSON value null as 'null'::jsonb, if that is what you mean."

REFUSALS: dict[str, tuple[dict[str, Any], str, str, str | None, str | None]] = {
    "priority below": ({"priority": -1}, "22023", "priority must be between 0 and 10", "It is -1.", None),
    "priority above": ({"priority": 11}, "22023", "priority must be between 0 and 10", "It is 11.", None),
    "empty idempotency key": (
        {"idempotency_key": ""},
        "22023",
        "idempotency key must have 1 to 512 bytes",
        "It has 0.",
        None,
    ),
    "long idempotency key": (
        {"idempotency_key": "é" * 257},
        "22023",
        "idempotency key must have 1 to 512 bytes",
        "It has 514.",
        None,
    ),
    "empty ordering key": ({"ordering_key": ""}, "22023", "ordering key must have 1 to 512 bytes", "It has 0.", None),
    "long ordering key": (
        {"ordering_key": "o" * 513},
        "22023",
        "ordering key must have 1 to 512 bytes",
        "It has 513.",
        None,
    ),
    "scheduled never": (
        {"scheduled_at": NEVER},
        "22023",
        "scheduled_at and expires_at must be times between the years 1970 and 9000",
        "They are infinity and null.",
        "Leave expires_at out for a message that never expires.",
    ),
    "expires never": (
        {"expires_at": NEVER},
        "22023",
        "scheduled_at and expires_at must be times between the years 1970 and 9000",
        "They are null and infinity.",
        "Leave expires_at out for a message that never expires.",
    ),
    "headers not an object": (
        {"headers": ["x-a"]},
        "22023",
        "headers must be a JSON object of names and texts",
        "It is of type array.",
        None,
    ),
    "headers JSON null": (
        {"headers": Jsonb(None)},
        "22023",
        "headers must be a JSON object of names and texts",
        "It is of type null.",
        None,
    ),
    "header name": ({"headers": {"x a": "b"}}, "22023", 'header "x a" is not a valid header', None, OBJECT_HINT),
    "header name empty": ({"headers": {"": "b"}}, "22023", 'header "" is not a valid header', None, OBJECT_HINT),
    "header of another type": (
        {"headers": {"x-a": 1}},
        "22023",
        'header "x-a" is not a valid header',
        None,
        OBJECT_HINT,
    ),
    "smuggled header": (
        {"headers": {"x-a": "b\r\nx-b: c"}},
        "22023",
        'header "x-a" is not a valid header',
        None,
        OBJECT_HINT,
    ),
    "metadata not an object": (
        {"metadata": [1]},
        "22023",
        "metadata must be a JSON object",
        "It is of type array.",
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_invalid_option_is_refused(queue: Queue, case: str) -> None:
    options, sqlstate, message, detail, hint = REFUSALS[case]

    error = queue.refuses("send", "shop", {}, **options)

    now = queue.value("select now()::text")
    assert error.sqlstate == sqlstate
    assert error.message_primary == message
    assert error.message_detail == (detail and detail.replace("{now}", now))
    assert error.message_hint == hint
    assert count(queue) == 0


def test_priority_must_not_be_null(queue: Queue) -> None:
    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match="priority must be") as caught,
        queue.db.transaction(),
    ):
        queue.value("select ulak.send('shop', '1', p_priority => null)")

    assert caught.value.diag.message_detail == "It is null."


def test_a_null_payload_is_refused(queue: Queue) -> None:
    error = queue.refuses("send", "shop", None)

    assert (error.sqlstate, error.message_primary) == ("22004", "the payload is null")
    assert error.message_hint == NULL_HINT


def test_an_unknown_endpoint_is_refused_with_the_nearest_name(queue: Queue) -> None:
    error = queue.refuses("send", "shpo", {})

    assert (error.sqlstate, error.message_primary) == ("42704", 'unknown endpoint "shpo"')
    assert error.message_hint is not None and "shop" in error.message_hint


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_no_endpoint_is_refused(queue: Queue, options: dict[str, Any]) -> None:
    error = queue.refuses("send", None, {}, **options)

    assert (error.sqlstate, error.message_primary) == ("42704", "unknown endpoint null")


def test_a_payload_may_have_max_payload_size_bytes_as_text(queue: Queue) -> None:
    queue.call("configure", "max_payload_size", "2000")

    id = queue.send(payload="x" * 1998)
    error = queue.refuses("send", "shop", Jsonb("x" * 1999))

    assert queue.message(id)["payload"] == "x" * 1998
    assert (error.sqlstate, error.message_primary) == ("54000", "the payload is larger than max_payload_size")
    assert error.message_detail == "It has 2001 bytes as text, the limit is 2000."
    assert error.message_hint is not None and "select ulak.configure('max_payload_size'," in error.message_hint


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}])
def test_the_smallest_limit_of_the_payload_holds(queue: Queue, options: dict[str, Any]) -> None:
    queue.call("configure", "max_payload_size", "1024")

    queue.send(payload="x" * 1022, **options)

    assert queue.refuses("send", "shop", Jsonb("x" * 1023), **options).sqlstate == "54000"


def test_a_number_that_is_short_in_memory_and_long_as_text_is_measured_as_text(queue: Queue) -> None:
    queue.call("configure", "max_payload_size", "1024")

    with pytest.raises(psycopg.errors.ProgramLimitExceeded), queue.db.transaction():
        queue.value("select ulak.send('shop', '1e2000')")


def test_an_application_can_not_raise_the_limit_of_the_payload(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.configure('max_payload_size', '1024')")
    application = connect("ulak_application")
    application.execute("set ulak.max_payload_size = 100000")

    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        application.execute("select ulak.send('shop', to_jsonb(repeat('x', 2000)))")


# Which roles may send, and what a caller can't change.


def test_an_application_sends_without_any_right_to_the_queue(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    application = connect("ulak_application")

    application.execute("select ulak.send('shop', '1', p_ordering_key => 'o', p_idempotency_key => 'k')")
    application.execute("select ulak.send_batch('shop', '{2,3}')")

    assert db.execute("select count(*) from ulak.queue").fetchone() == (3,)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        application.execute("select from ulak.queue")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect("nobody").execute("select ulak.send('shop', '1')")


def test_the_search_path_of_the_sender_does_not_matter(queue: Queue) -> None:
    queue.db.execute(
        """
        create schema evil;
        create function evil.octet_length(text) returns integer language sql as 'select 0';
        create function evil.now() returns timestamptz language sql as $$ select '2000-01-01'::timestamptz $$;
        create function evil.equal(text, text) returns boolean language sql as 'select true';
        create operator evil.= (function = evil.equal, leftarg = text, rightarg = text);
        set local search_path = evil, pg_catalog
        """
    )

    short, long = queue.send(payload={}), queue.send(payload={}, metadata={})

    queue.db.execute("set local search_path = pg_catalog")
    assert queue.message(short)["next_retry_at"] == queue.message(long)["next_retry_at"] == queue.base
    assert queue.refuses("send", "no such shop", {}).sqlstate == "42704"


# What a send does not do.

WAYS = [
    "select ulak.send('shop', '1')",
    "select ulak.send('shop', '1', p_idempotency_key => 'k')",
    "select ulak.send('shop', '1', p_idempotency_key => 'k')",
    "select ulak.send('shop', '1', p_ordering_key => 'o', p_headers => '{\"a\": \"b\"}', p_metadata => '{}')",
    "select ulak.send('shop', to_jsonb(repeat('x', 5000)), p_expires_at => now() + interval '1 h')",
    "select ulak.send_with_options('shop', '1', 1)",
    "select ulak.send_batch('shop', '{1,2}')",
    "select ulak.publish('sold', '1')",
    """select ulak.publish_batch('[{"event_type": "sold", "payload": 1}]')""",
]


def send_in_every_way(db: DB) -> None:
    for statement in WAYS:
        db.execute(statement)  # type: ignore[call-overload]


@pytest.fixture
def sender(connect: Connect) -> DB:
    """A session that has done nothing yet."""
    setup = connect()
    setup.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    setup.execute("select ulak.subscribe('sold', 'shop')")
    return connect()


def test_a_send_starts_no_subtransaction(sender: DB) -> None:
    sender.execute("set track_functions = 'all'")
    with sender.transaction():
        send_in_every_way(sender)
        top = sender.execute("select pg_current_xact_id()::xid").fetchone()
        called = sender.execute(
            """
            select p.proname, p.prosrc ~* 'exception\\s+when'
            from pg_stat_xact_user_functions f
            join pg_proc p on p.oid = f.funcid
            """
        ).fetchall()

    writers = sender.execute(
        "select xmin from ulak_private.deliveries union select xmin from ulak_private.events union select xmin from ulak_private.idempotency_keys"
    ).fetchall()
    assert writers == [top]
    assert {"send", "enqueue", "publish"} <= {name for name, _ in called}
    assert [name for name, may_catch in called if may_catch] == []


def test_a_send_does_not_notify(sender: DB) -> None:
    traces: list[str] = []
    sender.add_notice_handler(lambda notice: traces.append(notice.message_primary or ""))
    sender.execute("set trace_notify = on; set client_min_messages = debug1")

    send_in_every_way(sender)

    assert not [trace for trace in traces if "Async_Notify" in trace]
    sender.execute("notify anybody")
    assert [trace for trace in traces if "Async_Notify" in trace]


def test_a_send_loads_no_python(sender: DB) -> None:
    libraries = Path(f"/proc/{sender.info.backend_pid}/maps")

    send_in_every_way(sender)

    assert "plpgsql.so" in libraries.read_text()
    assert "python" not in libraries.read_text()
    sender.execute("do language plpython3u 'pass'")
    assert "python" in libraries.read_text()


def test_a_plain_send_asks_nothing_but_its_insert(sender: DB) -> None:
    sender.execute("select ulak.send('shop', '1')")
    sender.execute("set track_functions = 'all'")
    with sender.transaction():
        for _ in range(20):
            sender.execute("select ulak.send('shop', '1')")

        calls = sender.execute(
            """
            select proname, pg_stat_get_xact_function_calls(oid)
            from pg_proc
            where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and pg_stat_get_xact_function_calls(oid) > 0
            """
        ).fetchall()

    assert calls == [("send", 20)]


def test_the_first_message_of_an_installation_is_number_one(db: psycopg.Connection[Any]) -> None:
    queue = Queue(db)
    queue.endpoint()

    assert [queue.send(), queue.send()] == [1, 2]
