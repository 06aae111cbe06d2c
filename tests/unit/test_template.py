"""Bodies made of templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ulak.messages.delivery import ConfigError, Message, MessageError
from ulak.transports.http import template

PAYLOAD = '{"order": {"id": 7, "total": 19.90, "note": null}, "items": [{"sku": "a"}, {"sku": "b", "n": 2}], "who": "Zoë \\"Z\\""}'
METADATA = '{"tenant": "acme", "event_type": "order.paid"}'


def fill(body: Any, payload: str = PAYLOAD, content_type: str = "application/json", **fields: Any) -> str:
    message = Message(**({"id": 5, "message_id": "m", "attempt": 1, "payload": payload, "metadata": METADATA} | fields))
    return template.parse(body, content_type).fill(message)


def test_texts_are_filled_and_what_is_no_text_stays() -> None:
    body = {
        "text": "Order {payload.order.id} of {metadata.tenant}: {payload.items.1.sku}",
        "n": 1,
        "list": [True, None],
    }

    assert json.loads(fill(body)) == {"text": "Order 7 of acme: b", "n": 1, "list": [True, None]}


def test_a_path_takes_a_value_as_it_is() -> None:
    body = {"total": {"$path": "$.order.total"}, "skus": {"$path": "$.items[*].sku"}, "first": {"$path": "$.items[0]"}}

    assert fill(body) == '{"total": 19.90, "skus": ["a", "b"], "first": {"sku": "a"}}'


def test_numbers_keep_their_spelling() -> None:
    assert fill({"$path": "$.n"}, '{"n": 12345678901234567890.100}') == "12345678901234567890.100"
    assert fill("{payload.n}", '{"n": 1.10}', "text/plain") == "1.10"


def test_what_a_message_brings_can_not_leave_its_text() -> None:
    assert json.loads(fill({"text": "hello {payload.who}"})) == {"text": 'hello Zoë "Z"'}
    # Nor is it a template itself.
    assert json.loads(fill(["{payload}"], '"{metadata.tenant}"')) == ["{metadata.tenant}"]


def test_the_whole_payload_can_be_a_text() -> None:
    assert json.loads(fill({"Detail": "{payload}"}, '{"a": [1, "x"]}')) == {"Detail": '{"a": [1, "x"]}'}


def test_facts_of_the_message_have_names_of_their_own() -> None:
    assert fill("{id} {message_id} {ordering_key|none}", content_type="text/plain") == "5 m none"


def test_a_text_in_a_form_is_percent_encoded() -> None:
    form = "application/x-www-form-urlencoded; charset=utf-8"

    assert fill("a=1&Message={payload.who}", content_type=form) == "a=1&Message=Zo%C3%AB+%22Z%22"


def test_doubled_braces_are_braces() -> None:
    assert fill("{{payload}} {payload.order.id}", content_type="text/plain") == "{payload} 7"


@pytest.mark.parametrize(
    "body", ["{payload.nothing}", "{payload.order.note}", "{payload.order.id.more}", "{correlation_id}"]
)
def test_a_text_that_can_not_be_filled_refuses_the_message(body: str) -> None:
    with pytest.raises(MessageError, match="nothing for"):
        fill([body])


def test_a_path_that_finds_nothing_or_several_refuses_the_message() -> None:
    with pytest.raises(MessageError, match="finds nothing"):
        fill({"$path": "$.nothing"})
    with pytest.raises(MessageError, match="finds several"):
        fill({"$path": "$.items.sku"})


def test_missing_values_may_have_another() -> None:
    assert fill({"a": {"$path": "$.nothing", "missing": None}, "b": "{payload.nothing|-}"}) == '{"a": null, "b": "-"}'
    assert fill({"$path": "$.nothing[*]", "missing": 1}) == "[]"


def test_a_ping_keeps_the_places() -> None:
    body = {"text": "Order {payload.order.id}", "skus": {"$path": "$.sku"}}

    assert json.loads(fill(body, '{"type": "ulak.ping"}', id=0)) == {
        "text": "Order {payload.order.id}",
        "skus": "$.sku",
    }


def test_a_body_has_a_largest_size() -> None:
    with pytest.raises(MessageError, match="more than 10000000 bytes"):
        fill([{"$path": "$"}] * 150, json.dumps("x" * 100_000))
    with pytest.raises(MessageError, match="more than 10000000 bytes"):
        fill("{payload}" * 150, json.dumps("x" * 100_000), "text/plain")


def test_paths_visit_a_limited_number_of_values() -> None:
    with pytest.raises(MessageError, match="visit more than"):
        fill({"$path": "$" + "[*]" * 100}, json.dumps([0] * 20_000))


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "}",
        "{payload",
        "{secret}",
        "{message_id.x}",
        "{}",
        {"$path": "items"},
        {"$path": "$.a ? (@ > 1)"},
        {"$path": 1},
    ],
)
def test_an_invalid_template_is_refused(body: Any) -> None:
    with pytest.raises(ConfigError):
        template.parse([body], "application/json")
