"""207: a receiver that took some messages of a batch and not the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.transports.http import multistatus, verdict
from ulak.transports.http.model import Endpoint, Finished, Message, Outcome, Request, Settings

MESSAGES = [Message(10 + n, f"{n}e9f2c6a-0000-4000-8000-000000000000", 1, json.dumps({"n": n})) for n in range(4)]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["failed", "id", "index", "error"]), inner),
)


def judge(endpoint: Endpoint, body: Any, **fields: Any) -> Outcome:
    request = Request(endpoint.profile, [], json.dumps([json.loads(each.payload) for each in MESSAGES]).encode())
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return verdict.judge(endpoint, Finished(request, 207, body=text, **fields), 0, MESSAGES)


def errors(outcome: Outcome) -> list[str | None]:
    return [outcome.of(each).error for each in MESSAGES]


@pytest.fixture
def batching(make_endpoint: Any) -> Endpoint:
    made: Endpoint = make_endpoint(batch_size=10)
    return made


@pytest.mark.parametrize(
    "named",
    [
        [MESSAGES[1].message_id, MESSAGES[3].message_id],
        [MESSAGES[1].message_id.upper(), 3],
        [1, 3],
        [{"id": MESSAGES[1].message_id}, {"index": 3}],
    ],
)
def test_the_named_messages_failed_and_the_others_are_delivered(batching: Endpoint, named: list[Any]) -> None:
    told = errors(judge(batching, {"failed": named}))

    assert told == [None, "[RETRYABLE] HTTP 207", None, "[RETRYABLE] HTTP 207"]


def test_a_receiver_may_say_why_and_that_it_is_hopeless(batching: Endpoint) -> None:
    body = {"failed": [{"index": 0, "error": "no such order", "permanent": True}, {"index": 1, "error": "busy"}]}

    assert errors(judge(batching, body))[:2] == ["[PERMANENT] HTTP 207: no such order", "[RETRYABLE] HTTP 207: busy"]


def test_what_a_receiver_repeats_of_a_message_is_not_kept(batching: Endpoint) -> None:
    long = Message(1, "a", 1, json.dumps({"card": "4111-1111-1111-1111-secret"}))
    request = Request(batching.profile, [], f"[{long.payload}]".encode())
    body = json.dumps({"failed": [{"index": 0, "error": f"can't read {long.payload}"}]}).encode()

    outcome = verdict.judge(batching, Finished(request, 207, body=body), 0, [long])

    assert "4111-1111-1111-1111" not in str(outcome.of(long).error)


def test_nothing_failed_is_a_delivery(batching: Endpoint) -> None:
    outcome = judge(batching, {"failed": []})

    assert (outcome.error, outcome.failures, outcome.status) == (None, None, 207)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "it isn't JSON"),
        (b"<multistatus/>", "it isn't JSON"),
        (b"[" * 100000, "it isn't JSON"),
        ([1], 'it has no list "failed"'),
        ({"failed": "all"}, 'it has no list "failed"'),
        ({"failed": [4]}, "it names a message that isn't in the batch"),
        ({"failed": [-1]}, "it names a message that isn't in the batch"),
        ({"failed": [True]}, "it names a message that isn't in the batch"),
        ({"failed": ["somebody else's"]}, "it names a message that isn't in the batch"),
        ({"failed": [{}]}, "it names a message that isn't in the batch"),
    ],
)
def test_an_answer_that_is_not_understood_delivers_nothing(batching: Endpoint, body: Any, reason: str) -> None:
    outcome = judge(batching, body)

    assert outcome.error == f"[RETRYABLE] HTTP 207 that doesn't tell which messages failed: {reason}"
    assert outcome.failures is None


def test_without_batches_207_is_an_ordinary_delivery(make_endpoint: Any) -> None:
    assert judge(make_endpoint(), b"<multistatus/>") == Outcome(status=207)


def test_a_captured_answer_is_kept_with_each_message(make_endpoint: Any) -> None:
    endpoint = make_endpoint(settings=Settings(capture_response=True), batch_size=10)

    outcome = judge(endpoint, {"failed": [1]})

    assert [json.loads(outcome.of(each).response or "")["status"] for each in MESSAGES] == [207] * 4


@given(ANYTHING)
def test_no_answer_does_worse_than_not_being_understood(answer: Any) -> None:
    try:
        refused = multistatus.parse(json.dumps(answer).encode(), MESSAGES)
    except ValueError:
        return
    assert {each.message for each in refused} <= set(MESSAGES)
