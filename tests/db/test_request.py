"""What is particular to the request of one message: raw bodies, paths and time-outs, from send() to wherever it goes."""

from __future__ import annotations

import shlex
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue


@pytest.fixture(autouse=True)
def web(queue: Queue) -> None:
    queue.endpoint("web", {"url": "https://example.com/v1"}, protocol="http")
    queue.endpoint("shop")


def refused(queue: Queue, statement: str, *parameters: Any) -> psycopg.errors.Diagnostic:
    with pytest.raises(psycopg.Error) as caught, queue.db.transaction():
        queue.value(statement, *parameters)
    return caught.value.diag


RAW = '{ "b": 1,   "a": 2, "a": 3 }\r\n'


def test_a_raw_body_is_kept_byte_for_byte_with_its_content_type(queue: Queue) -> None:
    id = queue.value("select ulak.send('web', p_raw => %s, p_content_type => 'text/plain')", RAW)

    message = queue.message(id)
    assert (message["payload"], message["headers"]) == (RAW, {":body": "raw", "content-type": "text/plain"})


def test_an_external_worker_gets_a_raw_body_as_a_json_string(queue: Queue) -> None:
    queue.value("select ulak.send('shop', p_raw => %s)", RAW)

    assert queue.rows("select payload, headers from ulak.claim('w', 1, 'shop', p_now => %s)", queue.base) == [
        {"payload": RAW, "headers": {":body": "raw"}}
    ]


def test_what_is_particular_goes_with_all_other_options(queue: Queue) -> None:
    id = queue.value(
        """
        select ulak.send(
            'web', '1', 5, p_idempotency_key => 'k', p_ordering_key => 'o', p_headers => '{"x-a": "b"}', p_path => 'orders/5',
            p_timeout => 2.5
        )
        """
    )

    message = queue.message(id)
    assert message["headers"] == {"x-a": "b", ":path": "orders/5", ":timeout": "2.5"}
    assert (message["priority"], message["idempotency_key"], message["ordering_key"]) == (5, "k", "o")
    assert queue.value("select ulak.send('web', '1', p_idempotency_key => 'k', p_path => 'orders/5')") == id


def test_each_message_of_an_array_may_have_its_own(queue: Queue) -> None:
    messages = [{"payload": 1}, {"raw": RAW, "content_type": "text/x"}, {"payload": 2, "path": "a", "timeout": 1}]

    ids = queue.value("select ulak.send_messages('web', %s)", Jsonb(messages))

    assert queue.rows("select id, payload, headers from ulak.queue order by id") == [
        {"id": ids[0], "payload": 1, "headers": None},
        {"id": ids[1], "payload": RAW, "headers": {":body": "raw", "content-type": "text/x"}},
        {"id": ids[2], "payload": 2, "headers": {":path": "a", ":timeout": "1"}},
    ]


def test_curl_shows_the_request_as_it_is_sent(queue: Queue) -> None:
    id = queue.value("select ulak.send('web', p_raw => %s, p_path => 'orders?x=1', p_timeout => 2.5)", RAW)

    words = shlex.split(queue.value("select ulak.curl(%s)", id))

    assert words[-1] == "https://example.com/v1/orders?x=1"
    assert words[words.index("--data-raw") + 1] == '${ "b": 1,   "a": 2, "a": 3 }\\015\\012'
    assert words[words.index("--max-time") + 1] == "2.5"


def test_a_redriven_and_a_replayed_message_are_sent_in_the_same_way(queue: Queue) -> None:
    id = queue.value("select ulak.send('web', p_raw => %s, p_path => 'orders')", RAW)
    sent = {name: queue.message(id)[name] for name in ("payload", "headers")}

    queue.value("select ulak.archive_single_to_dlq(%s)", id)
    redriven = queue.value("select ulak.redrive_message(id) from ulak.dlq")

    assert {name: queue.message(redriven)[name] for name in sent} == sent


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a b",
        "a\\b",
        "a#b",
        "é",
        "a\n",
        "..",
        "a/../b",
        "a/%2e%2E/b",
        "a/..%2fb",
        "a/%2e",
        "https://b.example/",
        "//b.example/",
        "%",
        "%2",
        "a%0d%0ab",
        "a%00",
        "x" * 2049,
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused(queue: Queue, path: str) -> None:
    error = refused(queue, "select ulak.send('web', '1', p_path => %s)", path)

    assert error.sqlstate == "22023"
    assert (error.message_primary or "").startswith("the path ")


@pytest.mark.parametrize("path", ["a", "/a/b", "a..b/c", "?x=../y", "a?x=%20", "orders/5/", "~me/(a);b=c,d", "b@c"])
def test_other_paths_are_accepted(queue: Queue, path: str) -> None:
    assert queue.value("select ulak.send('web', '1', p_path => %s)", path) > 0


@pytest.mark.parametrize(
    ("statement", "code", "message"),
    [
        ("select ulak.send('web', '1', p_raw => '1')", "22023", "a message has a payload or a raw body, not both"),
        ("select ulak.send('web', p_content_type => 'text/x')", "22004", "the payload is null"),
        ("select ulak.send('web')", "22004", "the payload is null"),
        ("select ulak.send('web', '1', p_timeout => 0)", "22023", "the time-out must be between 0.1 and 300 seconds"),
        (
            "select ulak.send('web', '1', p_timeout => 'NaN')",
            "22023",
            "the time-out must be between 0.1 and 300 seconds",
        ),
        ("select ulak.send('web', '1', p_content_type => 'json')", "22023", 'content type "json" is not valid'),
        ("select ulak.send('web', '1', p_content_type => E'a/b;\\n')", "22023", 'content type "a/b;\n" is not valid'),
        (
            "select ulak.send('shop', '1', p_path => 'a')",
            "22023",
            "a message for a pull endpoint has no path and no time-out",
        ),
        ("select ulak.send('none', '1', p_path => 'a')", "42704", 'unknown endpoint "none"'),
        ("select ulak.send('web', p_raw => repeat('x', 2000))", "54000", "the payload is larger than max_payload_size"),
        (
            """select ulak.send('web', '1', p_headers => '{":path": "a"}')""",
            "22023",
            'header ":path" is not a valid header',
        ),
    ],
)
def test_what_is_not_valid_is_refused(queue: Queue, statement: str, code: str, message: str) -> None:
    queue.call("configure", "max_payload_size", "1024")

    error = refused(queue, statement)

    assert (error.sqlstate, error.message_primary) == (code, message)


def test_a_message_can_not_bring_the_endpoints_signature(queue: Queue) -> None:
    queue.endpoint("git", {"url": "https://example.com", "signature": {"scheme": "github"}}, protocol="http")

    error = refused(queue, """select ulak.send('git', '1', p_headers => '{"X-Hub-Signature-256": "mine"}')""")

    assert error.sqlstate == "42501"
