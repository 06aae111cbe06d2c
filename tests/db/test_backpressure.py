"""A full queue refuses messages, by the same verdicts as if it were probed at each send."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cluster import Connect
from support.queue import DB, Queue
from support.sessions import wait_until

LIVE = "select count(*) from ulak.queue where status in ('pending', 'processing')"
IS_ALONE = """
    select count(*) = 1 from pg_stat_activity where datname = current_database() and backend_type = 'client backend'
"""
HEADROOM = "select last_value from ulak_private.queue_headroom"
HINT = (
    "This is backpressure: try again later, when receivers have caught up. "
    "An administrator can see what waits: select * from ulak.get_endpoint_health();"
)

Step = tuple[str, int]


@pytest.fixture(scope="module")
def database(module_database: str) -> str:
    """One for all tests here. Not the fixture `queue`: what a send remembers outlives its transaction."""
    return module_database


@pytest.fixture
def shop(db: DB) -> Queue:
    db.execute(
        "truncate ulak_private.deliveries, ulak_private.idempotency_keys, ulak.endpoints, ulak.event_types cascade"
    )
    shop = Queue(db)
    # A session of the test before tells what it has called when it ends.
    wait_until(lambda: shop.value(IS_ALONE), "the end of other sessions")
    shop.value("select ulak.configure('max_queue_size', null), pg_stat_reset()")
    shop.endpoint("shop")
    return shop


def limit(shop: Queue, size: int) -> None:
    shop.call("configure", "max_queue_size", str(size))


def is_full(shop: Queue) -> bool:
    try:
        shop.send()
    except psycopg.errors.ConfigurationLimitExceeded:
        return True
    return False


def late_session(connect: Connect) -> Queue:
    """In a transaction whose snapshot is taken here."""
    session = connect(autocommit=False)
    session.execute("set transaction isolation level repeatable read")
    return Queue(session)


def probes(shop: Queue, function: str = "probe_reserve") -> int:
    """How often this session has probed the queue since the fixture began."""
    shop.value("select pg_stat_force_next_flush()")
    calls = shop.value("select calls from pg_stat_user_functions where funcname = %s", function)
    return int(calls or 0)


# The limit.


def test_a_full_queue_refuses_and_says_so(shop: Queue) -> None:
    limit(shop, 3)
    shop.send_many(3)

    error = shop.refuses("send", "shop", {})

    assert (error.sqlstate, error.message_primary) == (
        "53400",
        "queue backpressure: 1 more message would exceed the limit of 3",
    )
    assert error.message_detail == "max_queue_size is 3."
    assert error.message_hint == HINT
    assert shop.value(LIVE) == 3


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}, {"ordering_key": "o"}, {"metadata": {}}])
def test_the_limit_is_reached_and_not_passed(shop: Queue, options: dict[str, Any]) -> None:
    limit(shop, 3)

    for _ in range(2):
        shop.send()
    shop.send(**options)

    assert shop.refuses("send", "shop", {"n": 2}, **{**options, "idempotency_key": "another"}).sqlstate == "53400"
    assert shop.value(LIVE) == 3


def test_messages_in_flight_count_and_finished_ones_do_not(shop: Queue) -> None:
    limit(shop, 4)
    shop.send(expires_at=3600)
    shop.send_many(3)
    claims = shop.claim(4, now=60)
    assert is_full(shop)

    shop.complete(claims[0])
    shop.fail(claims[1], permanent=True)

    assert not is_full(shop)
    assert not is_full(shop)
    assert is_full(shop)


def test_0_turns_the_limit_off(shop: Queue) -> None:
    limit(shop, 1)
    shop.send()
    assert is_full(shop)

    limit(shop, 0)

    shop.send_many(50)
    assert shop.value(LIVE) == 51


def test_a_batch_is_counted_before_any_insert(shop: Queue) -> None:
    limit(shop, 5)
    shop.send_many(3)

    error = shop.refuses("send_batch", "shop", "{1,2,3}")

    assert error.sqlstate == "53400"
    assert error.message_primary == "queue backpressure: 3 more messages would exceed the limit of 5"
    assert shop.value(LIVE) == 3
    assert len(shop.send_many(2)) == 2


def test_a_fan_out_is_counted_before_any_insert(shop: Queue) -> None:
    shop.call("create_event_type", "sold")
    for name in ("a", "b", "c"):
        shop.endpoint(name)
        shop.call("subscribe", "sold", name)
    limit(shop, 5)
    shop.send_many(3)

    assert shop.refuses("publish", "sold", "1").sqlstate == "53400"
    assert shop.refuses("publish_batch", [{"event_type": "sold", "payload": 1}]).sqlstate == "53400"
    assert shop.value(LIVE) == 3


def test_a_message_that_was_rolled_back_takes_no_room(shop: Queue) -> None:
    limit(shop, 2)
    with shop.db.transaction(force_rollback=True):
        shop.send_many(2)
        assert shop.refuses("send", "shop", {}).sqlstate == "53400"

    assert len(shop.send_many(2)) == 2


def test_a_message_that_is_queued_already_needs_no_room(shop: Queue) -> None:
    limit(shop, 1)
    first = shop.send(idempotency_key="k")

    assert shop.send(idempotency_key="k") == first
    assert is_full(shop)
    assert shop.send(idempotency_key="k") == first
    assert shop.refuses("send", "shop", {"n": 2}, idempotency_key="k").sqlstate == "23505"


# What is remembered.

# As if the queue had been found full, for this many seconds from now on; and a send in the same moment.
SEND_WHILE_FULL = """
    select
        setval('ulak_private.queue_headroom', -(extract(epoch from clock_timestamp()) * 1000)::bigint - 1000 * %s),
        ulak.send('shop', '{}')
"""


def test_a_full_queue_takes_a_message_as_soon_as_there_is_room(shop: Queue) -> None:
    limit(shop, 3)
    shop.send_many(3)

    for claim in shop.claim(3, now=1):
        assert is_full(shop)
        shop.complete(claim, now=2)
        assert not is_full(shop)


def test_a_large_full_queue_is_remembered_for_a_millisecond_per_thousand_messages(shop: Queue) -> None:
    limit(shop, 5000)
    shop.send_many(5000)
    clock = "select extract(epoch from clock_timestamp())::float"
    before = shop.value(clock)
    assert is_full(shop)
    after = shop.value(clock)

    assert before + 0.004 <= -shop.value(HEADROOM) / 1000 <= after + 0.006
    shop.complete(shop.claim_one(now=1))
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        shop.value(SEND_WHILE_FULL, 9)

    shop.value(SEND_WHILE_FULL, 0)


def test_a_batch_that_is_too_large_does_not_make_the_queue_full(shop: Queue) -> None:
    limit(shop, 3)
    shop.send()

    assert shop.refuses("send_batch", "shop", "{1,2,3}").sqlstate == "53400"

    assert not is_full(shop)


def test_the_queue_is_probed_twice_for_as_many_sends_as_it_holds(shop: Queue) -> None:
    """The first probe promises half of the limit, the second one the other half."""
    shop.db.execute("set track_functions = 'all'")
    limit(shop, 100)

    for _ in range(30):
        shop.send()
    for n in range(10):
        shop.send(idempotency_key=str(n))
    shop.send_many(60)

    assert shop.value(LIVE) == 100
    assert probes(shop) == 2


def test_a_large_full_queue_is_not_probed_while_it_is_remembered(shop: Queue) -> None:
    limit(shop, 1000)
    shop.send_many(1000)
    shop.db.execute("set track_functions = 'all'")

    for _ in range(20):
        with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
            shop.value(SEND_WHILE_FULL, 9)

    assert probes(shop) == 0


def test_without_a_limit_nothing_is_probed(shop: Queue) -> None:
    limit(shop, 0)
    shop.db.execute("set track_functions = 'all'")

    for _ in range(3):
        shop.send()
        shop.send_many(3)

    assert probes(shop) == 0
    assert probes(shop, "check_backpressure") == 1


def test_a_probe_says_what_fits_and_promises_the_largest_reserve_of_a_ladder(shop: Queue) -> None:
    """Reserves of 80: 40, 20, 10, 5, 2, 1."""
    found = {}
    for live in (0, 40, 41, 60, 61, 70, 75, 78, 79, 80, 81):
        shop.db.execute("truncate ulak_private.deliveries, ulak_private.idempotency_keys")
        shop.send_many(live)
        shop.claim(live // 3 + 1, now=60)
        found[live] = shop.value("select ulak_private.probe_reserve(80, 1)")

    assert found == {0: 40, 40: 40, 41: 20, 60: 20, 61: 10, 70: 10, 75: 5, 78: 2, 79: 1, 80: 0, 81: 0}


@given(live=st.integers(0, 40), size=st.integers(1, 40), messages=st.integers(1, 50))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_probe_never_promises_more_than_is_free_nor_less_than_half(
    shop: Queue, live: int, size: int, messages: int
) -> None:
    shop.db.execute("truncate ulak_private.deliveries, ulak_private.idempotency_keys")
    shop.send_many(live)

    reserve = int(shop.value("select ulak_private.probe_reserve(%s, %s)", size, messages))

    free = max(size - live, 0)
    if messages > free:
        assert reserve == free
    else:
        assert max(messages, min(free, size // 2) // 2) <= reserve <= free


# Whose limit it is.


def test_a_limit_that_is_lowered_holds_at_once(shop: Queue) -> None:
    limit(shop, 100)
    shop.send_many(5)

    limit(shop, 5)

    assert is_full(shop)


def test_a_limit_that_is_raised_holds_at_once(shop: Queue) -> None:
    limit(shop, 5)
    shop.send_many(5)
    assert is_full(shop)

    limit(shop, 6)

    assert not is_full(shop)
    assert is_full(shop)


def test_the_default_comes_back_at_once(shop: Queue) -> None:
    limit(shop, 1)
    shop.send()
    assert is_full(shop)

    shop.value("select ulak.configure('max_queue_size', null)")

    assert not is_full(shop)


@pytest.mark.parametrize("value", ["0", "1000", "nonsense", ""])
def test_an_application_can_not_loosen_the_limit(connect: Connect, shop: Queue, value: str) -> None:
    limit(shop, 2)
    application = Queue(connect("ulak_application"))
    application.value("select set_config('ulak.max_queue_size', %s, false)", value)

    application.send_many(2)

    assert is_full(application)
    assert application.refuses("send_batch", "shop", "{1}").sqlstate == "53400"


def test_an_application_can_not_tighten_the_limit_either(connect: Connect, shop: Queue) -> None:
    application = Queue(connect("ulak_application"))
    application.value("select set_config('ulak.max_queue_size', '1', false)")

    application.send()

    assert not is_full(application)


def test_an_uncommitted_limit_is_not_promised_to_other_sessions(connect: Connect, shop: Queue) -> None:
    limit(shop, 2)
    other = Queue(connect())

    with shop.db.transaction(force_rollback=True):
        limit(shop, 100)
        shop.send_many(3)

    other.send_many(2)
    assert is_full(other)


def test_an_older_snapshot_decides_for_itself_only(connect: Connect, shop: Queue) -> None:
    limit(shop, 2)
    shop.send_many(2)
    late = late_session(connect)
    for claim in shop.claim(2, now=60):
        shop.complete(claim)

    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        late.send()
    assert not is_full(shop)
    late.db.rollback()


def test_an_older_snapshot_promises_nothing(connect: Connect, shop: Queue) -> None:
    limit(shop, 3)
    late = late_session(connect)
    shop.send_many(2)
    limit(shop, 3)

    late.send()
    late.db.commit()

    assert is_full(shop)


# The same verdicts as those of a count of all that is live.

STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.just(1)),
        st.tuples(st.just("send"), st.just(1)),
        st.tuples(st.just("batch"), st.integers(1, 5)),
        st.tuples(st.just("roll back"), st.integers(1, 5)),
        st.tuples(st.just("claim"), st.integers(1, 4)),
        st.tuples(st.just("complete"), st.integers(1, 4)),
        st.tuples(st.just("limit"), st.integers(0, 8)),
    ),
    min_size=5,
    max_size=25,
)


def plain_verdict(shop: Queue, size: int, messages: int) -> bool:
    return size == 0 or int(shop.value(LIVE)) + messages <= size


def accepted(shop: Queue, messages: int, *, alone: bool, keep: bool = True) -> bool:
    try:
        with shop.db.transaction(force_rollback=not keep):
            if alone:
                shop.send()
            else:
                shop.send_many(messages)
    except psycopg.errors.ConfigurationLimitExceeded:
        return False
    return True


@given(steps=STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_promise_gives_the_verdicts_of_a_count(shop: Queue, steps: list[Step]) -> None:
    size = 4
    shop.db.execute("delete from ulak.queue")
    limit(shop, size)
    for kind, number in steps:
        if kind in ("send", "batch", "roll back"):
            expected = plain_verdict(shop, size, number)
            assert accepted(shop, number, alone=kind == "send", keep=kind != "roll back") == expected
        elif kind == "claim":
            shop.claim(number, now=3600)
        elif kind == "complete":
            shop.value(
                """
                select count(ulak.complete(t.id, t.locked_by, t.attempts))
                from (select * from ulak.queue where status = 'processing' order by id limit %s) t
                """,
                number,
            )
        else:
            limit(shop, size := number)


def test_the_error_names_the_endpoints_for_which_most_waits(shop: Queue) -> None:
    for count, name in enumerate(("quiet", "third", "second", "first")):
        shop.endpoint(name)
        if count:
            shop.send_many(count, name)
    shop.value("select ulak_private.sample_backlog()")
    limit(shop, 6)

    error = shop.refuses("send", "shop", {"n": 1})

    assert error.message_detail == ('max_queue_size is 6. Most wait for "first" (3), "second" (2), "third" (1).')
