"""What is kept of an answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ulak.messages.delivery import EndpointConfig
from ulak.transports.http import endpoint, response
from ulak.transports.http.model import Finished, Profile, Request

ENDPOINT = endpoint.parse(EndpointConfig(1, "orders", 1, {"url": "http://example.com/"}))
REQUEST = Request(Profile("http://example.com/"), [], b"")


def captured(*lines: bytes, **fields: Any) -> Any:
    return json.loads(response.capture(ENDPOINT, Finished(REQUEST, 200, headers=tuple(lines), **fields)))


def test_secret_headers_are_never_kept() -> None:
    names = (
        b"Authorization Cookie Set-Cookie Proxy-Authorization Webhook-Signature X-Hub-Signature X-Api-Key "
        b"WWW-Authenticate X-Amz-Security-Token X-Refresh-Token"
    ).split()

    kept = captured(b"HTTP/1.1 200 OK\r\n", b"X-Fine: yes\r\n", *[name + b": hush\r\n" for name in names])

    assert kept["headers"] == {"x-fine": "yes"}
    assert "hush" not in json.dumps(kept)


def test_only_the_final_answers_headers_count() -> None:
    kept = captured(
        b"HTTP/1.1 200 Connection established\r\n",
        b"via: proxy\r\n",
        b"\r\n",
        b"HTTP/1.1 100 Continue\r\n",
        b"\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"x: 1\r\n",
        b"x: 2\r\n",
        b"\r\n",
    )

    assert kept["headers"] == {"x": "1, 2"}


def test_timing_is_in_milliseconds_and_a_cut_body_says_so() -> None:
    kept = captured(body=b"abc", truncated=True, seconds=0.25, first_byte_seconds=0.125)

    assert (kept["total_ms"], kept["first_byte_ms"], kept["truncated"]) == (250, 125, True)


@given(st.binary(), st.lists(st.binary(max_size=50)))
def test_any_bytes_become_json_that_postgresql_can_store(body: bytes, lines: list[bytes]) -> None:
    text = response.capture(ENDPOINT, Finished(REQUEST, 200, headers=tuple(lines), body=body))

    json.loads(text)
    text.encode()
    assert "\\u0000" not in text


def test_the_answer_to_a_batch_takes_4_mb_at_most_in_all_its_messages_together() -> None:
    lines = tuple(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(60))
    finished = Finished(REQUEST, 200, headers=lines, body=b"z" * 65536)

    for messages in (2, 100, 500, 10000):
        text = response.capture(ENDPOINT, finished, messages)

        assert (len(text) - 1500) * messages <= 4 * 1024 * 1024
        assert json.loads(text).get("truncated", False) is (messages > 2)
