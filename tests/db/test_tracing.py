"""Tracing: the transaction's trace travels with what it sends, and each attempt is a span of its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.queue import Queue

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    return queue


def trace(queue: Queue, parent: str = PARENT, state: str | None = None) -> None:
    queue.db.execute("select set_config('ulak.traceparent', %s, true)", [parent])
    if state is not None:
        queue.db.execute("select set_config('ulak.tracestate', %s, true)", [state])


def headers(queue: Queue) -> list[Any]:
    return queue.column("select headers from ulak.sent()")


def test_every_way_of_sending_takes_the_transactions_trace(queue: Queue) -> None:
    queue.call("create_event_type", "order.placed")
    queue.call("subscribe", "order.placed", "shop")
    trace(queue, state="vendor=1")

    queue.send()
    queue.send(priority=3, idempotency_key="k")
    queue.send(max_retries=1)
    queue.send_many(1)
    queue.call("send_messages", "shop", '[{"payload": 3}]')
    queue.value("select ulak.send_many('{shop}', '4')")
    queue.call("publish", "order.placed", "5")
    queue.call("publish_batch", '[{"event_type": "order.placed", "payload": 6}]')

    found = [(each["traceparent"], each["tracestate"]) for each in headers(queue)]
    assert found == [(PARENT, "vendor=1")] * 8


def test_a_message_keeps_a_trace_of_its_own(queue: Queue) -> None:
    trace(queue, state="vendor=1")
    other = PARENT.replace("4bf9", "5bf9")

    queue.call("send", "shop", "1", headers={"traceparent": other})
    queue.call("send", "shop", "1", headers={"Traceparent": other})
    queue.call("send", "shop", "1", headers={"x-a": "b"})

    assert headers(queue) == [
        {"traceparent": other},
        {"traceparent": other},
        {"x-a": "b", "traceparent": PARENT, "tracestate": "vendor=1"},
    ]


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        PARENT.upper(),
        PARENT + "-00",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT + "\r\nx-evil: 1",
    ],
)
def test_a_trace_that_is_not_valid_is_ignored(queue: Queue, parent: str) -> None:
    trace(queue, parent, "vendor=1")

    queue.send()

    assert headers(queue) == [None]


@pytest.mark.parametrize("state", ["", "a=b\r\nx-evil: 1", "x" * 513])
def test_a_state_that_is_not_valid_is_ignored_and_the_trace_is_not(queue: Queue, state: str) -> None:
    trace(queue, state=state)

    queue.send()

    assert headers(queue) == [{"traceparent": PARENT}]


def test_each_attempt_is_a_span_of_its_own_which_history_shows(queue: Queue) -> None:
    trace(queue)
    id = queue.send()
    first = queue.claim_one(now=0)
    queue.fail(first, "no", now=1)
    second = queue.claim_one(now=1000)
    queue.complete(second, now=1001)

    shown = queue.rows("select trace_id, span_id from ulak.history(%s, %s)", id, queue.at(2000))

    sent = [re.fullmatch(rf"00-{TRACE}-([0-9a-f]{{16}})-01", each.headers["traceparent"]) for each in (first, second)]
    assert [each["trace_id"] for each in shown] == [TRACE, TRACE]
    assert [each["span_id"] for each in shown] == [each[1] for each in sent if each]
    assert len({each["span_id"] for each in shown} | {"00f067aa0ba902b7"}) == 3


def test_a_trace_in_any_case_has_spans(queue: Queue) -> None:
    queue.call("send", "shop", "1", headers={"TraceParent": PARENT, "TraceState": "vendor=A"})

    sent = queue.claim_one(now=0).headers

    assert re.fullmatch(rf"00-{TRACE}-(?!00f067aa0ba902b7)[0-9a-f]{{16}}-01", sent["traceparent"])
    assert sent["tracestate"] == "vendor=A"


def test_a_redrive_has_spans_of_its_own_in_the_same_trace(queue: Queue) -> None:
    trace(queue)
    queue.send(max_retries=0)
    first = queue.claim_one(now=0)
    queue.fail(first, "no", now=1)
    letter = queue.value("select id from ulak.dlq")
    again = queue.call("redrive_message", letter, now=queue.at(2))
    second = queue.claim_one(now=3)

    spans = queue.column("select trace_id || span_id from ulak.history(%s, %s)", again, queue.at(4))

    assert spans == [each.headers["traceparent"].replace("-", "")[2:-2] for each in (first, second)]
    assert len(set(spans)) == 2


def test_generation_and_trace_travel_together(queue: Queue) -> None:
    trace(queue)
    queue.send(generation=7)

    sent = queue.claim_one().headers

    assert set(sent) == {"traceparent", "ulak-generation"}
    assert sent["ulak-generation"] == "7"


def test_a_message_without_a_trace_has_neither_headers_nor_spans(queue: Queue) -> None:
    id = queue.send()
    claim = queue.claim_one()

    assert claim.headers is None
    assert queue.rows("select trace_id, span_id from ulak.history(%s)", id) == [{"trace_id": None, "span_id": None}]


def test_a_trace_of_its_own_that_is_not_valid_goes_as_it_is(queue: Queue) -> None:
    queue.call("send", "shop", "1", headers={"traceparent": "mine"}, generation=2)

    assert queue.claim_one().headers == {"traceparent": "mine", "ulak-generation": "2"}
