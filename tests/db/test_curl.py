"""curl(): a message's request as a command that the receiver can't tell from the worker's."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.receiver import Receiver

DB = psycopg.Connection[Any]

SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXh5eg=="


def command(queue: Queue, id: int) -> list[str]:
    return shlex.split(queue.value("select ulak.curl(%s)", id))


def test_the_command_sends_the_same_request(db: DB) -> None:
    queue = Queue(db)
    with Receiver() as receiver:
        queue.endpoint("shop", {"url": receiver.url, "method": "PUT", "headers": {"x-team": "it's"}}, protocol="http")
        id = queue.send("shop", {"price": "5 €", "text": "a'b"}, headers={"x-own": "1"})

        words = command(queue, id)
        subprocess.run([*words, "--silent", "--output", "/dev/null"], check=True)

        (request,) = receiver.wait_for(1)
    message_id = queue.value("select message_id::text from ulak.queue")
    assert (request.method, request.body) == ("PUT", queue.value("select payload::text from ulak.queue").encode())
    assert request.headers["x-team"] == "it's"
    assert request.headers["x-own"] == "1"
    assert request.headers["webhook-id"] == message_id


def test_secrets_are_masked(queue: Queue) -> None:
    queue.call("set_secret", "api", "hunter2-hunter2")
    queue.endpoint(
        "shop",
        {
            "url": "https://example.com/hook",
            "signing_secret": SECRET,
            "auth": {"type": "bearer", "token": {"$secret": "api"}},
            "headers": {"x-api-key": "k-k-k-k"},
        },
        protocol="http",
    )

    text = " ".join(command(queue, queue.send()))

    assert "authorization: Bearer ****" in text
    assert "x-api-key: ****" in text
    assert "webhook-signature: ****" in text
    assert "hunter2" not in text
    assert "k-k-k-k" not in text


def test_an_oauth2_token_is_not_fetched_for_it(queue: Queue) -> None:
    auth = {"type": "oauth2", "token_url": "https://127.0.0.1:1/t", "client_id": "c", "client_secret": "s-s-s-s"}
    queue.endpoint("shop", {"url": "https://example.com/hook", "auth": auth}, protocol="http")

    text = " ".join(command(queue, queue.send()))

    assert "authorization: Bearer ****" in text
    assert "s-s-s-s" not in text


def test_it_works_wherever_the_message_is(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "https://example.com/hook"}, protocol="http")
    ids = queue.send_many(3)
    queue.bury(ids[0])
    queue.complete(queue.claim_one(endpoint="shop"))
    # As retention leaves it: only the dead letter.
    queue.bury(dead := queue.send())
    queue.db.execute("delete from ulak_private.archived where id = %s", [dead])

    for id in (*ids, dead):
        assert command(queue, id)[-1] == "https://example.com/hook"


def test_a_pull_endpoint_has_no_request(queue: Queue) -> None:
    queue.endpoint()

    error = queue.refuses("curl", queue.send())

    assert (error.sqlstate, error.message_detail) == ("22023", "The protocol of its endpoint is pull.")


def test_an_unknown_message_is_an_error(queue: Queue) -> None:
    assert queue.refuses("curl", 10**12).sqlstate == "P0002"


def test_only_administrators_see_a_payload(db: DB, connect: Connect) -> None:
    db.execute("""select ulak.create_endpoint('shop', 'http', '{"url": "https://example.com/hook"}')""")
    (id,) = db.execute("select ulak.send('shop', '{}')").fetchone()  # type: ignore[misc]

    connect("ulak_admin").execute("select ulak.curl(%s)", [id])

    for role in ("ulak_monitor", "ulak_application", "ulak_worker"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connect(role).execute("select ulak.curl(%s)", [id])
