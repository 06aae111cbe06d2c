"""From message to outcome, over real sockets."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from standardwebhooks import Webhook
from support.deliveries import Deliveries, settle_all, worker_endpoint
from support.receiver import Answer, Received, Receiver
from support.sessions import patience
from ulak import ping
from ulak.messages.delivery import Settled
from ulak.transports.http import batch
from ulak.transports.http.model import Settings


def test_every_message_is_settled_once(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:
    endpoint = make_endpoint(receiver.url)
    for number in range(100):
        deliveries.send(endpoint, [make_message(number)])

    settled = settle_all(deliveries)

    assert sorted(each.messages[0].id for each in settled) == list(range(100))
    assert {each.outcome.error for each in settled} == {None}
    assert len(receiver.requests) == 100


def test_a_receiver_can_verify_what_arrives(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:

    deliveries.send(make_endpoint(receiver.url, secrets=["whsec_bmV3", "whsec_b2xk"]), [make_message()])
    settle_all(deliveries)

    (got,) = receiver.requests
    assert Webhook("whsec_bmV3").verify(got.body, got.headers) == {"order": 1}
    assert Webhook("whsec_b2xk").verify(got.body, got.headers) == {"order": 1}


def test_a_batch_is_one_request_and_one_outcome(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:
    receiver.answer = Answer(422)
    endpoint = make_endpoint(receiver.url, batch_size=3)
    messages = [make_message(number, str(number)) for number in range(7)]
    for group in batch.group(endpoint, messages):
        deliveries.send(endpoint, group)

    settled = settle_all(deliveries)

    assert sorted(json.loads(each.body) for each in receiver.requests) == [[0, 1, 2], [3, 4, 5], [6]]
    assert sorted(len(each.messages) for each in settled) == [1, 3, 3]
    assert {each.outcome.error for each in settled} == {"[PERMANENT] HTTP 422"}


def test_a_message_that_cannot_be_sent_is_permanent_and_alone(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:
    endpoint = make_endpoint(receiver.url)
    deliveries.send(endpoint, [make_message(1, headers='{"a\\nb": "c"}')])
    deliveries.send(endpoint, [make_message(2)])

    errors = {each.messages[0].id: each.outcome.error for each in settle_all(deliveries)}

    assert errors[1] is not None and errors[1].startswith("[PERMANENT] message: the message's header 'a\\nb'")
    assert errors[2] is None


# What the receiver sends, and how long to wait; None leaves it to the usual backoff.
RETRY_AFTER = {
    "0": 0,
    "17": 17,
    "999999": 86400,
    "-5": None,
    "1.5": None,
    "soon": None,
    "": None,
    "Thu, 01 Jan 1970 00:00:00 GMT": 0,
    "Fri, 31 Dec 2999 23:59:59 GMT": 86400,
    "Sun, 06 Nov 1994 99:99:99 GMT": None,
}


def test_every_retry_after_of_429_and_503_reaches_its_outcome(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:
    values = list(RETRY_AFTER)
    receiver.answer = lambda got: Answer(int(got.body) // 100, {"Retry-After": values[int(got.body) % 100]}, b"busy")
    endpoint = make_endpoint(receiver.url)
    for status in (429, 503):
        for number in range(len(values)):
            deliveries.send(endpoint, [make_message(status * 100 + number, str(status * 100 + number))])

    settled = settle_all(deliveries)

    assert len(settled) == 2 * len(values)
    for each in settled:
        code = int(each.messages[0].payload)
        assert each.outcome.error == f"[RETRYABLE] HTTP {code // 100}: busy"
        assert each.outcome.retry_after == RETRY_AFTER[values[code % 100]]


def test_a_captured_response_reaches_the_outcome(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, make_message: Any
) -> None:
    receiver.answer = Answer(202, {"X-Id": "7", "Set-Cookie": "hush"}, b"0123456789")
    settings = Settings(capture_response=True, response_body_max_size=4)
    deliveries.send(make_endpoint(receiver.url, settings), [make_message()])

    (settled,) = settle_all(deliveries)

    assert settled.outcome.response is not None
    kept = json.loads(settled.outcome.response)
    assert (kept["status"], kept["body"], kept["truncated"]) == (202, "0123", True)
    assert kept["headers"] == {"content-length": "10", "x-id": "7"}
    assert 0 < kept["first_byte_ms"] <= kept["total_ms"]


def test_a_step_returns_at_once_what_never_needed_the_network(
    deliveries: Deliveries, make_endpoint: Any, make_message: Any
) -> None:
    deliveries.send(make_endpoint(), [make_message(headers="[]")])

    # Longer than any test may take.
    assert len(deliveries.step(3600)) == 1
    assert deliveries.in_flight == 0


def test_a_ping_is_signed_and_tells_what_came_back(
    deliveries: Deliveries, receiver: Receiver, make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    step, has_stepped = deliveries.dispatcher.step, threading.Event()

    def noted(max_wait: float) -> list[Settled]:
        waits.append(max_wait)
        return step(max_wait)

    def between_steps() -> None:
        if len(waits) == 2:
            has_stepped.set()

    def when_it_has_stepped(got: Received) -> Answer:
        return Answer(404, body=b"no such hook" if has_stepped.wait(patience()) else b"")

    monkeypatch.setattr(deliveries.dispatcher, "step", noted)
    receiver.answer = when_it_has_stepped
    outcome = ping.deliver(
        worker_endpoint(
            make_endpoint(receiver.url, secrets=["correct horse"], settings=Settings(capture_response=True))
        ),
        deliveries.dispatcher,
        between_steps,
    )

    (got,) = receiver.requests
    Webhook(b"correct horse").verify(got.body, got.headers)
    assert outcome.error == "[PERMANENT] HTTP 404: no such hook"
    assert json.loads(outcome.response or "{}")["total_ms"] > 0
    assert max(waits) <= 0.1
