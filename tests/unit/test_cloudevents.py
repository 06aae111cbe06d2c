"""CloudEvents, read back with the CloudEvents project's own package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from hypothesis import given
from hypothesis import strategies as st
from ulak.messages import cloudevents, event
from ulak.messages.cloudevents import CloudEvents
from ulak.transports.http import header, request
from ulak.transports.http.model import Message, MessageError, Request, Settings

CONFIG = CloudEvents("structured", "/shop", "order.created")
MESSAGE = Message(
    7,
    "0190a5d2-5b9e-7000-8000-000000000007",
    1,
    '{"order": 7, "name": "Çiğdem"}',
    correlation_id="11111111-2222-3333-4444-555555555555",
    ordering_key="customer 5 %",
    created_at="2026-11-16 07:18:55.123456+00",
)


def read(built: Request) -> Any:
    return from_http_event(HTTPMessage(dict(header.split(line) for line in built.headers), built.body))


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_an_independent_reader_understands_the_event(make_endpoint: Any, mode: str) -> None:
    endpoint = make_endpoint(
        settings=Settings(cloudevents_source="/shop"),
        cloudevents=True,
        cloudevents_mode=mode,
        cloudevents_type="order.created",
    )

    event = read(request.build(endpoint, [MESSAGE], 1_800_000_000))

    assert event.get_id() == MESSAGE.message_id
    assert event.get_source() == "/shop"
    assert event.get_type() == "order.created"
    assert event.get_specversion() == "1.0"
    assert event.get_time().isoformat() == "2026-11-16T07:18:55.123456+00:00"
    assert event.get_extension("partitionkey") == "customer 5 %"
    assert event.get_extension("correlationid") == MESSAGE.correlation_id
    data = event.get_data()
    assert (data if isinstance(data, dict) else json.loads(data)) == {"order": 7, "name": "Çiğdem"}


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_a_messages_traceparent_becomes_an_attribute_too(make_endpoint: Any, mode: str) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    message = MESSAGE._replace(headers=json.dumps({"Traceparent": traceparent}))
    endpoint = make_endpoint(cloudevents=True, cloudevents_mode=mode)

    built = request.build(endpoint, [message], 1_800_000_000)

    assert read(built).get_extension("traceparent") == traceparent
    assert dict(header.split(line) for line in built.headers)["traceparent"] == traceparent


def test_the_content_type_of_a_structured_event_is_not_the_endpoints(make_endpoint: Any) -> None:
    endpoint = make_endpoint(cloudevents=True, cloudevents_mode="structured", headers={"Content-Type": "text/plain"})

    headers = dict(header.split(line) for line in request.build(endpoint, [MESSAGE], 0).headers)

    assert headers["content-type"] == "application/cloudevents+json"


def test_the_type_comes_from_the_endpoint_or_the_event_or_is_ours() -> None:
    published = MESSAGE._replace(metadata='{"event_type": "order.paid"}')
    untyped = CloudEvents("structured", "/shop")

    assert cloudevents.attributes(CONFIG, published)["type"] == "order.created"
    assert cloudevents.attributes(untyped, published)["type"] == "order.paid"
    assert cloudevents.attributes(untyped, MESSAGE)["type"] == "ulak.message"


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("2026-11-16 07:18:55+00", "2026-11-16T07:18:55+00:00"),
        ("2026-11-16 07:18:55.1-03", "2026-11-16T07:18:55.1-03:00"),
        ("2026-11-16 07:18:55+05:30", "2026-11-16T07:18:55+05:30"),
        ("2026-11-16T07:18:55Z", "2026-11-16T07:18:55Z"),
        ("2026-11-16T07:18:55+0530", "2026-11-16T07:18:55+05:30"),
    ],
)
def test_postgresqls_timestamps_become_rfc_3339(given_text: str, expected: str) -> None:
    assert cloudevents.rfc3339(given_text) == expected


@given(source=st.text(st.characters(codec="utf-8"), min_size=1), key=st.text(st.characters(codec="utf-8"), min_size=1))
def test_no_attribute_can_break_out_of_its_header(source: str, key: str) -> None:
    config = CloudEvents("binary", source, "t")

    found = cloudevents.represent(config, MESSAGE._replace(ordering_key=key), False, None, None)

    for name, given_value in found.attributes.items():
        value = cloudevents.header_value(given_value)
        assert header.problem(name, value) is None
        assert value.isascii()


EVENT = '{"ulak-event-id": "0190a5d2-5b9e-7000-8000-0000000000ff", "ulak-event-type": "order.created"}'


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_a_published_event_has_the_events_id_whichever_endpoint_it_goes_to(make_endpoint: Any, mode: str) -> None:
    endpoint = make_endpoint(cloudevents=True, cloudevents_mode=mode)

    built = request.build(endpoint, [MESSAGE._replace(headers=EVENT)], 1_800_000_000)

    assert read(built).get_id() == "0190a5d2-5b9e-7000-8000-0000000000ff"
    lines = dict(header.split(line) for line in built.headers)
    assert lines["ulak-event-id"] == "0190a5d2-5b9e-7000-8000-0000000000ff"
    assert lines["webhook-id"] == MESSAGE.message_id


def test_a_header_that_quotes_an_event_id_is_no_event_id() -> None:
    text = json.dumps({"x-a": '"ulak-event-id": "0190a5d2-5b9e-7000-8000-0000000000ff", '})

    quoting = MESSAGE._replace(headers=text)

    assert event.id_of(quoting) is None
    assert event.shared_headers(quoting) == text


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_source_and_subject_can_be_the_endpoints_own(make_endpoint: Any, mode: str) -> None:
    endpoint = make_endpoint(
        cloudevents=True, cloudevents_mode=mode, cloudevents_source="/orders", cloudevents_subject="küche 1"
    )

    event = read(request.build(endpoint, [MESSAGE], 1_800_000_000))

    assert (event.get_source(), event.get_subject()) == ("/orders", "küche 1")


RAW = '{ "b": 1,   "a": 2 }'


def raw(text: str, content_type: str | None = None) -> Message:
    headers = {":body": "raw"} | ({"content-type": content_type} if content_type else {})
    return MESSAGE._replace(payload=json.dumps(text), headers=json.dumps(headers))


def test_a_raw_body_is_the_body_of_a_binary_event(make_endpoint: Any) -> None:
    endpoint = make_endpoint(cloudevents=True)

    built = request.build(endpoint, [raw("<a/>", "application/xml")], 0)

    assert built.body == b"<a/>"
    event = read(built)
    assert (event.get_datacontenttype(), event.get_id()) == ("application/xml", MESSAGE.message_id)


def test_a_raw_body_is_the_data_of_a_structured_event_as_its_type_asks(make_endpoint: Any) -> None:
    endpoint = make_endpoint(cloudevents=True, cloudevents_mode="structured")

    as_json = request.build(endpoint, [raw(RAW)], 0)
    as_text = read(request.build(endpoint, [raw("a;b\n", "text/csv")], 0))

    assert RAW.encode() in as_json.body
    assert read(as_json).get_data() == {"a": 2, "b": 1}
    assert (as_text.get_data(), as_text.get_datacontenttype()) == ("a;b\n", "text/csv")
    with pytest.raises(MessageError, match="raw body isn't JSON"):
        request.build(endpoint, [raw("<a/>", "application/vnd.x+json")], 0)
