"""Several messages in one request."""

from __future__ import annotations

import json
from typing import Any

from cloudevents.core.formats.json import JSONFormat
from hypothesis import given
from hypothesis import strategies as st
from ulak.messages.delivery import EndpointConfig
from ulak.transports.http import batch, endpoint, header, request
from ulak.transports.http.model import Message

BATCHING = endpoint.parse(EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": 3}))


def messages(count: int, **fields: Any) -> list[Message]:
    return [Message(n, f"id-{n}", 1, json.dumps({"n": n}), **fields) for n in range(count)]


@given(
    st.lists(st.tuples(st.sampled_from([None, '{"a": "b"}']), st.integers(1, 60))),
    st.integers(1, 5),
)
def test_grouping_keeps_every_message_its_order_and_the_limits(drawn: list[tuple[Any, int]], size: int) -> None:
    target = endpoint.parse(EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": size}))
    sent = [Message(n, f"id-{n}", 1, "x" * length, headers) for n, (headers, length) in enumerate(drawn)]

    groups = batch.group(target, sent, max_body=100)

    assert [message for group in groups for message in group] == sent
    for group in groups:
        assert 1 <= len(group) <= size
        assert len({message.headers for message in group}) == 1
        assert len(group) == 1 or sum(len(message.payload) for message in group) <= 100


def test_messages_with_traces_of_their_own_share_a_request_that_has_none() -> None:
    traces = ['{"x": "y", "traceparent": "1"}', '{"x": "y", "tracestate": "b", "traceparent": "2"}', '{"x": "y"}']
    traced = [each._replace(headers=trace) for each, trace in zip(messages(3), traces, strict=True)]
    plain = messages(3)
    plain[0] = plain[0]._replace(headers='{"traceparent": "1"}')

    for group in (traced, plain):
        assert batch.group(BATCHING, group) == [group]
        lines = request.build(BATCHING, group, 0).headers
        assert not [line for line in lines if line.startswith("trace")]
        assert [line for line in request.build(BATCHING, group[:1], 0).headers if line == "traceparent: 1"]
    assert "x: y" in request.build(BATCHING, traced, 0).headers


def test_headers_that_cannot_be_read_are_no_reason_to_fail_others() -> None:
    broken = [
        each._replace(headers=text)
        for each, text in zip(messages(2), ['["traceparent"]', '{"traceparent"'], strict=True)
    ]

    assert batch.group(BATCHING, broken) == [[broken[0]], [broken[1]]]


def test_a_plain_batch_is_an_array_of_payloads() -> None:
    built = request.build(BATCHING, messages(3), 0)

    assert json.loads(built.body) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert "content-type: application/json" in built.headers


def test_a_batch_of_one_is_still_an_array_and_keeps_the_messages_id() -> None:
    built = request.build(BATCHING, messages(1), 0)

    assert json.loads(built.body) == [{"n": 0}]
    assert "webhook-id: id-0" in built.headers


def test_a_batch_sent_again_has_the_same_id_and_another_batch_another() -> None:
    assert batch.request_id(messages(3)) == batch.request_id(messages(3))
    assert batch.request_id(messages(3)) != batch.request_id(messages(2))


def test_a_cloudevents_batch_holds_readable_events() -> None:
    target = endpoint.parse(
        EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": 10, "batch_format": "cloudevents"})
    )

    built = request.build(target, messages(3, created_at="2026-11-16 07:18:55+00"), 0)

    headers = dict(header.split(line) for line in built.headers)
    assert headers["content-type"] == "application/cloudevents-batch+json"
    events = [JSONFormat().read(None, json.dumps(each)) for each in json.loads(built.body)]
    assert [event.get_id() for event in events] == ["id-0", "id-1", "id-2"]
    assert [event.get_data() for event in events] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_only_a_correlation_id_that_all_share_is_sent() -> None:
    shared = request.build(BATCHING, messages(2, correlation_id="c-1"), 0)
    mixed = request.build(BATCHING, [messages(1)[0], messages(2, correlation_id="c-1")[1]], 0)

    assert "x-correlation-id: c-1" in shared.headers
    assert not any("x-correlation-id" in str(line) for line in mixed.headers)


def test_the_attempt_of_a_batch_is_its_most_tried_messages() -> None:
    first, second = messages(2)

    built = request.build(BATCHING, [first, second._replace(attempt=4)], 0)

    assert "ulak-attempt: 4" in built.headers


def header_of(built: Any, name: str) -> str | None:
    return dict(header.split(line) for line in built.headers).get(name)


def test_a_plain_batch_names_its_messages_in_a_header_in_the_order_of_the_array() -> None:
    assert header_of(request.build(BATCHING, messages(3), 0), "ulak-message-ids") == "id-0,id-1,id-2"
    assert header_of(request.build(BATCHING, messages(1), 0), "ulak-message-ids") == "id-0"


def test_what_is_no_plain_batch_has_no_such_header() -> None:
    for config in ({}, {"batch_size": 5, "batch_format": "cloudevents"}, {"batch_size": 5, "batch_format": "envelope"}):
        target = endpoint.parse(EndpointConfig(1, "orders", 1, {"url": "http://example.com/", **config}))
        assert header_of(request.build(target, messages(1), 0), "ulak-message-ids") is None


def test_an_envelope_holds_a_message_and_its_id() -> None:
    target = endpoint.parse(
        EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": 9, "batch_format": "envelope"})
    )
    known = {"created_at": "2026-11-16 07:18:55+00", "ordering_key": 'k"ö', "correlation_id": "c"}

    built = request.build(target, [messages(1)[0], messages(2, **known)[1]._replace(attempt=3)], 0)

    assert json.loads(built.body) == [
        {"id": "id-0", "attempt": 1, "payload": {"n": 0}},
        {
            "id": "id-1",
            "attempt": 3,
            "time": "2026-11-16T07:18:55+00:00",
            "ordering_key": 'k"ö',
            "correlation_id": "c",
            "payload": {"n": 1},
        },
    ]
    assert "content-type: application/json" in built.headers


def test_messages_of_a_batch_are_in_the_order_of_their_ids() -> None:
    first, second, third = messages(3)

    assert batch.group(BATCHING, [third, first, second]) == [[first, second, third]]
    assert batch.request_id([first, second]) == batch.request_id(batch.group(BATCHING, [second, first])[0])


def test_a_header_never_has_to_hold_more_ids_than_receivers_take() -> None:
    def size(**config: Any) -> int:
        return endpoint.parse(
            EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": 5000, **config})
        ).batch_size

    assert size() == size(batch_format="json") == 100
    assert size(batch_format="envelope") == size(batch_format="cloudevents") == size(cloudevents=True) == 5000


def test_different_events_share_a_request_and_each_keeps_its_id() -> None:
    ids = [f"0190a5d2-5b9e-7000-8000-00000000000{n}" for n in range(3)]
    headers = [json.dumps({"x-a": "b", "ulak-event-id": id, "ulak-event-type": "sold"}) for id in ids]
    sent = [Message(n, f"id-{n}", 1, "1", headers[n]) for n in range(3)]
    target = endpoint.parse(
        EndpointConfig(1, "orders", 1, {"url": "http://example.com/", "batch_size": 10, "batch_format": "cloudevents"})
    )

    assert batch.group(target, sent) == [sent]
    built = request.build(target, sent, 0)

    assert [event["id"] for event in json.loads(built.body)] == ids
    lines = dict(header.split(line) for line in built.headers)
    assert "ulak-event-id" not in lines
    assert (lines["x-a"], lines["ulak-event-type"]) == ("b", "sold")
