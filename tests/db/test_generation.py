"""Generations: each message is for one generation of consumers, its sender's or the deployment's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue

PAYLOAD = Jsonb({"n": 1})


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.call("create_event_type", "sold")
    queue.call("subscribe", "sold", "shop")


# Each sends one message, of the given generation or of the setting's.
SENDERS: dict[str, Callable[[Queue, int | None], Any]] = {
    "send": lambda queue, given: queue.send(generation=given),
    "send with a header": lambda queue, given: queue.send(generation=given, headers={"x-a": "1"}),
    "send with a key": lambda queue, given: queue.send(generation=given, idempotency_key="once"),
    "send with a path": lambda queue, given: queue.call("send", "shop", raw="text", generation=given),
    "send_many": lambda queue, given: queue.call("send_many", "{shop}", PAYLOAD, generation=given),
    "send_messages": lambda queue, given: queue.call("send_messages", "shop", Jsonb([{"payload": 1} | key(given)])),
    "publish": lambda queue, given: queue.call("publish", "sold", PAYLOAD, generation=given),
    "publish_batch": lambda queue, given: queue.call(
        "publish_batch", Jsonb([{"event_type": "sold", "payload": 1} | key(given)])
    ),
}
# They take no generation.
BATCHES: dict[str, Callable[[Queue, int | None], Any]] = {
    "send_batch": lambda queue, given: queue.send_many(1),
    "send_with_options": lambda queue, given: queue.call("send_with_options", "shop", PAYLOAD),
}


def key(given: int | None) -> dict[str, Any]:
    return {} if given is None else {"generation": given}


def stored(queue: Queue) -> tuple[int | None, str | None]:
    """The generation of the only message, and what is sent of it."""
    generation = queue.value("select generation from ulak.queue")
    return generation, (queue.claim_one(now=1).headers or {}).get("ulak-generation")


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_a_message_has_the_generation_that_its_sender_gives_it(queue: Queue, send: Callable[..., Any]) -> None:
    queue.call("configure", "generation", "4")

    send(queue, 7)

    assert stored(queue) == (7, "7")


@pytest.mark.parametrize("send", (SENDERS | BATCHES).values(), ids=SENDERS | BATCHES)
def test_a_message_without_a_generation_has_that_of_the_setting(queue: Queue, send: Callable[..., Any]) -> None:
    queue.call("configure", "generation", "4")

    send(queue, None)

    assert stored(queue) == (4, "4")


@pytest.mark.parametrize("send", (SENDERS | BATCHES).values(), ids=SENDERS | BATCHES)
@pytest.mark.parametrize("value", [None, "0"])
def test_without_a_setting_a_message_has_no_generation(
    queue: Queue, send: Callable[..., Any], value: str | None
) -> None:
    queue.db.execute("select ulak.configure('generation', %s)", [value])

    send(queue, None)

    assert stored(queue) == (None, None)


def test_headers_of_its_own_stay_beside_the_generation(queue: Queue) -> None:
    queue.send(headers={"x-a": "1"}, generation=7, max_retries=2)

    assert queue.value("select headers from ulak.queue") == {"x-a": "1"}
    assert queue.claim_one().headers == {"x-a": "1", "ulak-generation": "7"}


@pytest.mark.parametrize("given", [0, -1])
def test_a_generation_is_a_number_from_1_on(queue: Queue, given: int) -> None:
    letter = queue.bury(queue.send())

    errors = [
        queue.refuses("send", "shop", PAYLOAD, generation=given),
        queue.refuses("publish", "sold", PAYLOAD, generation=given),
        queue.refuses("send_messages", "shop", Jsonb([{"payload": 1, "generation": given}])),
        queue.refuses("redrive_message", letter, new_generation=given),
        queue.refuses("redrive", "shop", new_generation=given),
        queue.refuses("redrive", "shop", new_generation=given, dry_run=True),
    ]

    assert [error.sqlstate for error in errors] == ["22023"] * 6


def test_no_sender_can_forge_the_header(queue: Queue) -> None:
    assert queue.refuses("send", "shop", PAYLOAD, headers={"ulak-generation": "9"}).sqlstate == "42939"


@pytest.mark.parametrize("new", [None, 9])
def test_a_letter_that_is_redriven_says_which_generation_it_is_for(queue: Queue, new: int | None) -> None:
    letter = queue.bury(queue.send(generation=7, headers={"x-a": "1"}))

    queue.call("redrive_message", letter, new_generation=new)

    assert stored(queue) == ((9, "9") if new else (7, "7"))
    assert queue.value("select headers ->> 'x-a' from ulak.queue") == "1"


def test_old_and_new_consumers_each_get_their_own(queue: Queue) -> None:
    queue.call("configure", "generation", "1")
    old = queue.send()
    queue.call("configure", "generation", "2")
    new = queue.send()

    assert [claim.id for claim in queue.claim(10, generation=1)] == [old]
    assert [(claim.id, (claim.headers or {})["ulak-generation"]) for claim in queue.claim(10, generation=2)] == [
        (new, "2")
    ]
