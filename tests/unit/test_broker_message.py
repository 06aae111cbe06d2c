"""A message as brokers carry it, and where it goes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, Message, MessageError
from ulak.transports.broker import message as broker_message
from ulak.transports.broker.route import Route


def message(payload: str = '{"order": 7}', **fields: Any) -> Message:
    return Message(7, "0190a5d2-5b9e-7000-8000-000000000007", 2, payload, **fields)


def no_problem(route: str) -> str | None:
    return "is too long" if len(route) > 20 else None


def test_a_payload_goes_as_it_is() -> None:
    made = broker_message.content(message())

    assert (made.body, made.content_type) == (b'{"order": 7}', "application/json")
    assert broker_message.headers(message(), made, "ce_") == {
        "ulak-message-id": "0190a5d2-5b9e-7000-8000-000000000007",
        "ulak-attempt": "2",
        "content-type": "application/json",
    }


def test_a_raw_body_goes_byte_for_byte_with_its_content_type_and_own_headers() -> None:
    given = {":body": "raw", ":path": "/x", ":timeout": "5", "Content-Type": "text/csv", "x-shop": "1"}
    raw = message(json.dumps("a,b\n1,2"), headers=json.dumps(given), created_at="2026-11-16 07:18:55+00")

    made = broker_message.content(raw)

    assert (made.body, made.content_type) == (b"a,b\n1,2", "text/csv")
    assert broker_message.headers(raw, made, "ce_") == {
        "ulak-message-id": raw.message_id,
        "ulak-attempt": "2",
        "ulak-created-at": "2026-11-16T07:18:55+00:00",
        "content-type": "text/csv",
        "x-shop": "1",
    }


def test_no_header_of_a_message_stands_for_one_of_ours() -> None:
    forged = message(headers='{"ulak-message-id": "another"}', correlation_id="c")

    found = broker_message.headers(forged, broker_message.content(forged), "ce_")

    assert (found["ulak-message-id"], found["ulak-correlation-id"]) == (forged.message_id, "c")


def test_cloudevents_stand_in_the_body_or_beside_it() -> None:
    structured = broker_message.content(message(), CloudEvents("structured", "/shop", "order.created"))
    binary = broker_message.content(message(), CloudEvents("binary", "/shop", "order.created"))

    assert structured.content_type == "application/cloudevents+json"
    assert json.loads(structured.body)["data"] == {"order": 7}
    assert (binary.body, binary.content_type) == (b'{"order": 7}', "application/json")
    assert binary.attributes["type"] == "order.created"


@pytest.mark.parametrize("headers", ["[]", "not json", '{"x": 1}', "[" * 100_000])
def test_headers_that_are_none_are_an_error_of_the_message(headers: str) -> None:
    with pytest.raises(MessageError, match="headers aren't"):
        broker_message.content(message(headers=headers))


def test_a_route_takes_fields_of_the_metadata() -> None:
    route = Route("topic", "orders.{event_type}.{shop}", no_problem)

    assert route.of(message(metadata='{"event_type": "paid", "shop": 5}')) == "orders.paid.5"
    assert Route("topic", "orders", no_problem).of(message()) == "orders"


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (None, "has no event_type, which topic asks for"),
        ('{"event_type": ""}', "has no event_type"),
        ('{"event_type": ["a"]}', "no text or number as event_type"),
        ('{"event_type": true}', "no text or number as event_type"),
        ('{"event_type": "a\\nb"}', "control character in event_type"),
        ('{"event_type": "aaaaaaaaaaaaaaaaaaaaaaaaaaaa"}', "topic is too long"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_metadata_that_makes_no_route_is_an_error_of_the_message(metadata: str | None, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        Route("topic", "orders.{event_type}", no_problem).of(message(metadata=metadata))


@pytest.mark.parametrize(
    ("template", "metadata", "separator"),
    [
        ("tenants/{tenant}/events", '{"tenant": "acme/admin"}', "/"),
        ("orders.{shop}", '{"shop": "1.admin"}', r"\."),
        ("s:{shop}", '{"shop": "a:b"}', ":"),
        ("orders/{event_type}", '{"event_type": "a/b"}', "/"),
    ],
)
def test_a_value_with_the_separator_of_its_route_is_refused_unless_the_config_allows_it(
    template: str, metadata: str, separator: str
) -> None:
    given = message(metadata=metadata)

    with pytest.raises(MessageError, match=f'has "{separator}" in'):
        Route("topic", template, lambda route: None).of(given)

    assert re.search(separator, Route("topic", template, lambda route: None, True).of(given))


def test_a_value_may_hold_what_does_not_part_its_route() -> None:
    values = message(metadata='{"event_type": "order.paid", "shop": "a.b", "place": "x/y"}')

    assert Route("topic", "orders.{event_type}", lambda route: None).of(values) == "orders.order.paid"
    assert Route("topic", "orders/{shop}", lambda route: None).of(values) == "orders/a.b"
    assert Route("topic", "{place}", lambda route: None).of(values) == "x/y"


@pytest.mark.parametrize("template", ["orders.{", "{event type}", "}", "{}", "x" * 21])
def test_a_template_that_cannot_be_read_is_an_error_of_the_config(template: str) -> None:
    with pytest.raises(ConfigError, match="topic"):
        Route("topic", template, no_problem)
