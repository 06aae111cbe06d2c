"""A message as a line of the server's log."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ulak.messages.delivery import Endpoint, EndpointConfig, Message
from ulak.transports.log.transport import MAX_BYTES, LogTransport, line

PREFIX = "ulak message: "


def endpoint(secrets: tuple[str, ...] = (), name: str = "orders", **config: Any) -> Endpoint:
    return LogTransport(print).parse(EndpointConfig(1, name, 1, config, (), secrets, "log"))


def read(given: Endpoint, payload: str = '{"order": 1}', **fields: Any) -> dict[str, Any]:
    told = line(given, Message(1, "m1", 2, payload, **fields))
    assert told.startswith(PREFIX)
    assert told.isascii() and told.isprintable()
    found: dict[str, Any] = json.loads(told.removeprefix(PREFIX))
    return found


def test_a_line_is_json_that_holds_the_message() -> None:
    found = read(
        endpoint(),
        '{"a": [1, null]}',
        metadata='{"k": "v"}',
        correlation_id="c1",
        ordering_key="k1",
        headers='{"x": "y"}',
    )

    assert found == {
        "endpoint": "orders",
        "message_id": "m1",
        "attempt": 2,
        "correlation_id": "c1",
        "ordering_key": "k1",
        "headers": {"x": "y"},
        "metadata": {"k": "v"},
        "payload": {"a": [1, None]},
    }


def test_it_stays_one_line_of_ascii_whatever_the_message_holds() -> None:
    payload = json.dumps({"a": "caf\u00e9\u2028\u202e\U0001f600"}, ensure_ascii=False)

    found = read(endpoint(name="caf\u00e9\u2028"), payload, ordering_key="a\nb\u202e")

    assert found["payload"] == {"a": "caf\u00e9\u2028\u202e\U0001f600"}
    assert found["endpoint"] == "caf\u00e9\u2028"
    assert found["ordering_key"] == "a b"


@pytest.mark.parametrize("payload", ['"' + "x" * 1_000_000 + '"', '"' + "\u20ac" * MAX_BYTES + '"'])
def test_it_is_bounded(payload: str) -> None:
    found = read(endpoint(), payload, metadata=payload, headers=json.dumps({"x": "y" * 1_000_000}))

    assert len(found["payload_start"]) == MAX_BYTES
    assert found["payload_length"] == len(payload)
    assert len(json.dumps(found)) < 5 * MAX_BYTES


def test_the_payload_is_left_out_if_the_config_says_so() -> None:
    found = read(endpoint(max_bytes=0))

    assert found == {"endpoint": "orders", "message_id": "m1", "attempt": 2, "payload_length": 12}


def test_secrets_are_hidden() -> None:
    given = endpoint(("correct-horse",))

    found = read(
        given, '{"a": "my correct-horse"}', headers='{"Authorization": "Bearer abc", "X-Api-Key": "k", "x": "y"}'
    )

    assert found["payload"] == {"a": "my ****"}
    assert found["headers"] == {"Authorization": "****", "X-Api-Key": "****", "x": "y"}


def test_a_secret_is_hidden_where_the_line_is_cut_through_it() -> None:
    given = endpoint(("correct-horse",), max_bytes=20)

    found = read(given, '"0123456789 correct-horse"')

    assert found["payload_start"] == '"0123456789 ****'
