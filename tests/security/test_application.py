"""An application whose messages can't be read or built: nobody else's delivery may suffer from them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import Site

# Behind the gate's back: such a message may have been sent before there was one.
INSERT = "insert into ulak.queue (endpoint_id, payload, metadata) values (%s, %s, %s) returning id"
# Each number is a few bytes in jsonb, and 131,072 digits as text.
VAST = '{"numbers": [' + ",".join(["1e131071"] * 9000) + "]}"


def failure(site: Site, id: int) -> str:
    """The error that it failed with; not the whole row, which nobody can read."""
    wait_until(lambda: site.value("select status from ulak.queue where id = %s", id) == "failed", 60, "its failure")
    return str(site.value("select last_error from ulak.queue where id = %s", id))


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


def test_a_message_of_more_than_a_gigabyte_fails_alone(site: Site, receiver: Receiver) -> None:
    endpoint = site.http("shop", receiver.url)
    before = site.send("shop")
    vast = site.value(INSERT, endpoint, "1", VAST)
    behind = site.send("shop")

    worker = site.start()

    assert failure(site, vast).startswith("[PERMANENT] the message can't be read: ")
    for id in (before, behind, site.send("shop")):
        assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


def test_large_messages_are_delivered_whole(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    # Not to be compressed below what is read with a claim.
    texts = [
        site.value("select string_agg(md5(n::text), '') from generate_series(%s::integer, %s::integer) n", n, n + 20000)
        for n in (1, 2)
    ]
    ids = [site.send("shop", {"text": text}, metadata={"n": 1}, headers={"x-own": "1"}) for text in texts]

    site.start()

    for id in ids:
        site.wait_for_status(id, "completed")
    arrived = [(json.loads(each.body)["text"], each.headers["x-own"]) for each in receiver.wait_for(2)]
    assert sorted(arrived) == sorted((text, "1") for text in texts)


@pytest.mark.parametrize("batch_size", [1, 10])
def test_metadata_that_is_too_deep_fails_alone_also_in_a_batch(site: Site, receiver: Receiver, batch_size: int) -> None:
    batched = {"batch_size": batch_size, "batch_format": "cloudevents"} if batch_size > 1 else {"cloudevents": True}
    endpoint = site.http("shop", receiver.url, **batched)
    before = site.send("shop", metadata={"event_type": "a"})
    deep = site.value(INSERT, endpoint, "1", nested(3000))
    behind = site.send("shop", metadata={"event_type": "b"})

    worker = site.start()
    error = failure(site, deep)

    assert error == "[PERMANENT] the message's metadata is nested too deeply to be read"
    for id in (before, behind):
        assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


@pytest.fixture
def unencoded(site_in: Callable[[str], Site]) -> Site:
    return site_in("SQL_ASCII")


def insert_broken(site: Site, endpoint: int, column: str) -> int:
    value = "convert_from('\\xff', 'SQL_ASCII')"
    value = value if column == "ordering_key" else f"jsonb_build_object('x', {value})"
    columns = {"payload": "'1'", "headers": "null", "metadata": "null", "ordering_key": "null", column: value}
    names, values = ", ".join(columns), ", ".join(columns.values())
    return int(site.value(f"insert into ulak.queue (endpoint_id, {names}) values ({endpoint}, {values}) returning id"))


@pytest.mark.parametrize("column", ["payload", "headers", "metadata", "ordering_key"])
def test_bytes_that_are_no_utf8_fail_alone_in_a_database_without_an_encoding(
    unencoded: Site, receiver: Receiver, column: str
) -> None:
    endpoint = unencoded.http("shop", receiver.url)
    before = unencoded.send("shop")
    broken = insert_broken(unencoded, endpoint, column)
    behind = unencoded.send("shop", {"text": "fine"})

    worker = unencoded.start()

    assert failure(unencoded, broken).startswith("[PERMANENT] the message can't be read: ")
    for id in (before, behind):
        assert unencoded.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


def test_bytes_that_are_no_utf8_fail_alone_in_light_traffic(unencoded: Site, receiver: Receiver) -> None:
    endpoint = unencoded.http("shop", receiver.url)
    worker = unencoded.start()
    unencoded.wait_for_status(unencoded.send("shop"), "completed")

    broken = insert_broken(unencoded, endpoint, "payload")
    neighbour = unencoded.send("shop")

    unencoded.wait_for_status(neighbour, "completed")
    assert failure(unencoded, broken).startswith("[PERMANENT] the message can't be read: ")
    assert not worker.call.is_done()
