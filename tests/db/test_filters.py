"""What a filter means, wherever one is given: a condition has to be true, a path has to lead to something."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.queue import DB, Queue

BULK = ("purge", "redrive", "discard", "retry_now")
PAYLOADS: list[dict[str, Any]] = [
    {"order": 5},
    {"order": 5000},
    {"order": 5000, "paid": False},
    {"order": 5, "paid": True, "items": [{"price": 3}, {"price": 30}]},
    {"items": []},
    {},
]


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop", policy={"max_retries": 9, "backoff": "fixed", "base_delay_seconds": 600})
    return queue


def chosen(queue: Queue, function: str, filter: str) -> set[int]:
    """Places of the payloads that a function chooses by a filter; nothing is changed."""
    if function in ("redrive", "discard"):
        payloads, place = "select id from ulak.dlq where status = 'failed' order by id", "dlq_id"
    else:
        payloads, place = "select id from ulak.queue where status = 'pending' order by id", "id"
    ids = queue.column(payloads)
    query = f"select * from ulak.{function}('shop', p_filter => %s::jsonpath, p_dry_run => true, p_now => %s)"
    (row,) = queue.rows(query, filter, queue.at(2))
    assert row["messages"] == len(row["sample"] or [])
    return {ids.index(each[place]) for each in row["sample"] or []}


def prepared(queue: Queue, payloads: list[Any]) -> None:
    """Each payload once in the backoff and once among the dead letters."""
    queue.empty()
    queue.endpoint("shop", policy={"max_retries": 9, "backoff": "fixed", "base_delay_seconds": 600})
    for payload in payloads:
        id = queue.value("select ulak.send('shop', %s)", Jsonb(payload))
        queue.bury(id)
    for payload in payloads:
        queue.value("select ulak.send('shop', %s)", Jsonb(payload))
    for claim in queue.claim(len(payloads), endpoint="shop"):
        queue.fail(claim, now=1)


@pytest.mark.parametrize("function", BULK)
def test_a_condition_counts_as_its_truth_and_a_path_as_there_is_something(queue: Queue, function: str) -> None:
    for part in (PAYLOADS[:4], PAYLOADS[2:]):
        prepared(queue, part)

        for filter, meant in {
            "$.order > 1000": lambda p: p.get("order", 0) > 1000,
            "strict $.order > 1000": lambda p: p.get("order", 0) > 1000,
            "$.paid == true": lambda p: p.get("paid") is True,
            "$.paid": lambda p: "paid" in p,
            "strict $.paid": lambda p: "paid" in p,
            "$ ? (@.order == 5)": lambda p: p.get("order") == 5,
            "$.items[*] ? (@.price > 10)": lambda p: any(i["price"] > 10 for i in p.get("items", [])),
            "exists($.items[*] ? (@.price > 10))": lambda p: any(i["price"] > 10 for i in p.get("items", [])),
            "!exists($.order)": lambda p: "order" not in p,
        }.items():
            assert chosen(queue, function, filter) == {n for n, p in enumerate(part) if meant(p)}, filter


scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "$x"]))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)
literals = st.sampled_from(["0", "2", "true", "false", "null", '"a"', '"$x"'])
paths = st.builds(
    lambda mode, steps, filter: mode + "$" + "".join(steps) + filter,
    st.sampled_from(["", "strict "]),
    st.lists(st.sampled_from([".a", ".b", ".*", "[*]", "[0]", ".type()", ".size()"]), max_size=3),
    st.sampled_from(["", " ? (@ > 0)", " ? (@.a == true)", " ? (exists(@.b))"]),
)
comparisons = st.builds(
    lambda path, operator, literal: f"({path} {operator} {literal})",
    paths.filter(lambda path: not path.startswith("strict")),
    st.sampled_from(["==", "!=", "<", ">="]),
    literals,
)
conditions = st.recursive(
    comparisons,
    lambda inner: (
        st.builds("({} && {})".format, inner, inner)
        | st.builds("({} || {})".format, inner, inner)
        | st.builds("(!{})".format, inner)
        | st.builds("({} is unknown)".format, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values, condition=conditions, path=paths)
def test_any_condition_is_its_truth_and_any_path_is_there_is_something(
    alone: DB, value: Any, condition: str, path: str
) -> None:
    """As PostgreSQL's own operators have it."""
    means = "select jsonb_path_match_tz(%s, ulak_private.condition(%s::jsonpath, 'filter'), '{}', true)"

    for filter, operator in ((condition, "jsonb_path_match_tz"), (path, "jsonb_path_exists_tz")):
        meant = alone.execute(f"select {operator}(%s, %s::jsonpath, '{{}}', true)", [Jsonb(value), filter]).fetchone()
        told = alone.execute(means, [Jsonb(value), filter]).fetchone()
        assert meant is not None and told is not None
        assert bool(told[0]) == bool(meant[0]), (filter, value)


@pytest.mark.parametrize("function", BULK)
def test_a_filter_that_says_nothing_about_the_payload_is_refused(queue: Queue, function: str) -> None:
    for filter, message in {
        "1": "the filter says nothing about the payload",
        "$.a > $x": "the filter has a variable",
    }.items():
        error = queue.refuses(function, "shop", filter=filter)
        assert (error.sqlstate, error.message_primary) == ("22023", message)


def test_a_subscription_by_a_path_is_refused_with_the_condition_it_would_be(queue: Queue) -> None:
    queue.call("create_event_type", "sold")

    error = queue.refuses("subscribe", "sold", "shop", predicate="$.items[*] ? (@.price > 10)")

    assert (error.sqlstate, error.message_primary) == ("22023", "the predicate is a path, not a condition")
    assert error.message_hint is not None
    spelling = error.message_hint.split(": ", 1)[1].split(". Otherwise")[0]
    assert spelling == 'exists ($."items"[*]?(@."price" > 10))'
    queue.call("subscribe", "sold", "shop", predicate=spelling)


@pytest.mark.parametrize("function", BULK)
def test_a_dry_run_shows_the_payload_to_those_who_may_read_it(queue: Queue, function: str, connect: Connect) -> None:
    prepared(queue, [{"word": "swordfish"}, {"long": "x" * 5000}])
    sample = f"select sample from ulak.{function}('shop', p_dry_run => true)"

    short, long = queue.value(sample)
    assert short["payload"] == {"word": "swordfish"}
    assert long["payload"].startswith('{"long": "xxx') and len(long["payload"]) == 1003

    # A role that was granted the function, but not the messages.
    queue.db.execute("create role helper")
    # Since PostgreSQL 16 a role that creates one may not act as that one before it has granted it to itself.
    queue.db.execute("grant helper to current_user")
    queue.db.execute("grant usage on schema ulak to helper; grant execute on all functions in schema ulak to helper")
    # A parameter's default is worked out with the rights of the caller.
    queue.db.execute("grant execute on function ulak_private.caller() to helper")
    queue.db.execute("set local role helper")
    assert "payload" not in queue.value(sample)[0]
    queue.db.execute("reset role")


@pytest.mark.parametrize("function", BULK)
def test_a_selection_by_ids_is_what_is_done_and_the_command_says_so(queue: Queue, function: str) -> None:
    prepared(queue, PAYLOADS)
    of_letters = function in ("redrive", "discard")
    ids = queue.column("select id from ulak.dlq order by id" if of_letters else "select id from ulak.queue order by id")
    chosen = [ids[1], ids[4]]

    (plan,) = queue.rows(f"select * from ulak.{function}(null, p_ids => %s, p_dry_run => true)", chosen)
    (done,) = queue.rows(plan["command"])

    assert (plan["messages"], done["messages"]) == (2, 2)
    assert f"p_ids => '{{{ids[1]},{ids[4]}}}'" in plan["command"]
    assert queue.rows(f"select messages from ulak.{function}(null, p_ids => '{{}}')") == [{"messages": 0}]


# retry_now()


def due(queue: Queue) -> list[float]:
    times = queue.column("select next_retry_at from ulak.queue order by id")
    return [(time - queue.at(0)).total_seconds() for time in times]


def test_what_waits_for_a_retry_is_due_at_once(queue: Queue) -> None:
    prepared(queue, PAYLOADS[:2])
    fresh = queue.send(scheduled_at=500)

    (row,) = queue.rows("select * from ulak.retry_now('shop', p_now => %s)", queue.at(2))

    assert row["messages"] == 2
    assert due(queue) == [2, 2, 500]
    assert len(queue.claim(10, endpoint="shop", now=2)) == 2
    assert queue.status(fresh) == "pending"
    assert queue.events("messages.%") == ["messages.retried"]


def test_a_rate_spreads_what_becomes_due(queue: Queue) -> None:
    prepared(queue, PAYLOADS[:4])

    (row,) = queue.rows("select * from ulak.retry_now('shop', p_rate => 2, p_now => %s)", queue.at(2))

    assert row["messages"] == 4
    assert due(queue) == [2, 2.5, 3, 3.5]


def test_neither_a_time_that_was_set_nor_a_place_in_a_key_is_changed_by_a_retry(queue: Queue) -> None:
    first, second = (queue.send(ordering_key="k") for _ in range(2))
    queue.fail(queue.claim_one(endpoint="shop"), now=1)
    later = queue.send()
    queue.fail(queue.claim_one(endpoint="shop", now=1), now=1)
    queue.call("reschedule", later, queue.at(900), now=queue.at(1))

    assert queue.value("select messages from ulak.retry_now('shop', p_now => %s)", queue.at(2)) == 1

    assert [claim.id for claim in queue.claim(10, endpoint="shop", now=2)] == [first]
    assert queue.status(second) == "pending"


def test_a_retry_keeps_the_budget_and_spares_what_is_in_flight(queue: Queue) -> None:
    prepared(queue, PAYLOADS[:2])
    flying = queue.send()
    queue.claim(1, endpoint="shop", now=2)

    assert queue.value("select messages from ulak.retry_now('shop', p_now => %s)", queue.at(3)) == 2

    assert queue.status(flying) == "processing"
    assert queue.column("select distinct retry_count from ulak.queue where status = 'pending'") == [1]


def test_a_retry_or_a_purge_of_everything_at_once_is_refused(queue: Queue) -> None:
    for function in ("purge", "retry_now"):
        assert queue.refuses(function, None).sqlstate == "42704"
    assert queue.refuses("retry_now", "shop", rate=-1).sqlstate == "22023"
