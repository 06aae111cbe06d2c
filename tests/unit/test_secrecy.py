"""Which values are secret, and which part of a payload is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.messages.delivery import EndpointConfig
from ulak.transports.http import request, secrecy, verdict
from ulak.transports.http.model import Finished, Profile, Request

NOW = 1_800_000_000

SECRET_CONFIGS: dict[str, dict[str, Any]] = {
    "bearer": {"auth": {"type": "bearer", "token": "hush-1"}},
    "basic": {"auth": {"type": "basic", "username": "ada", "password": "hush-1"}},
    "sigv4": {
        "auth": {
            "type": "aws_sigv4",
            "access_key": "hush-1",
            "secret_key": "hush-2",
            "region": "r",
            "service": "s",
            "session_token": "hush-3",
        }
    },
    "headers": {"headers": {"X-Api-Key": "hush-1", "Authorization": "Token hush-2"}},
    "proxy": {"proxy": {"url": "http://proxy.example.com", "username": "ada", "password": "hush-1"}},
    "url": {"url": "http://127.0.0.1/hooks/hush-path-1?token=hush-2&b=hush%2F3"},
}


def excerpt(endpoint: Any, built: Request, body: str) -> str:
    error = verdict.judge(endpoint, Finished(built, 400, body=body.encode()), NOW).error
    assert error is not None
    return error.removeprefix("[PERMANENT] HTTP 400").removeprefix(": ")


@pytest.mark.parametrize("config", SECRET_CONFIGS)
def test_an_echo_of_the_request_shows_no_secret(make_endpoint: Any, make_message: Any, config: str) -> None:
    endpoint = make_endpoint(**SECRET_CONFIGS[config], secrets=["hush-signing"])
    built = request.build(endpoint, [make_message()], NOW)
    lines = [line if isinstance(line, str) else line.decode() for line in built.headers]
    signatures = [line.partition(",")[2] for line in lines if line.startswith("webhook-signature")]

    for line in (*lines, endpoint.profile.url, endpoint.profile.url.partition("127.0.0.1")[2]):
        told = excerpt(endpoint, built, line)

        assert "hush" not in told
        assert "aHVzaC" not in told
        assert not [signature for signature in signatures if signature in told]


def test_of_a_url_that_is_a_secret_the_host_is_hidden_too(make_endpoint: Any) -> None:
    from ulak.transports.http import endpoint

    url = "https://hush.example.com/hook"
    parsed = endpoint.parse(EndpointConfig(1, "orders", 1, {"url": url}, secrets=[url]))
    failed = Finished(Request(parsed.profile, [], b""), 0, "resolve", "Could not resolve host: hush.example.com")

    error = verdict.judge(parsed, failed, NOW).error

    assert error == "[RETRYABLE] resolve: Could not resolve host: ****"


LEAVES = st.one_of(
    st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, blacklist_characters="*"), min_size=2, max_size=60),
    st.integers(min_value=10),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), LEAVES, min_size=1), st.booleans())
def test_an_echoed_payload_shows_no_value(payload: dict[str, Any], is_ascii: bool) -> None:
    sent = Request(Profile("http://x/"), [], json.dumps(payload).encode())
    echo = json.dumps(payload, indent=1, ensure_ascii=is_ascii)

    told = secrecy.hide_payload(" ".join(echo.split()), sent, ())

    words = set(told.replace('"', " ").replace(",", " ").split())
    # Names of fields and the signs of JSON are no values, whatever they look like.
    values = {str(value) for value in payload.values()} - {*payload, "{", "}", ":"}
    assert not words & {value for value in values if value.isalnum()}


@given(st.text("abcdefghijklmnop ", min_size=60), st.integers(0, 30))
def test_a_piece_of_a_long_text_is_not_quoted(text: str, start: int) -> None:
    sent = Request(Profile("http://x/"), [], json.dumps({"text": "_" + text + "_"}).encode())
    piece = " ".join(text[start : start + 30].split())
    if len(piece) < 30:
        return

    assert piece not in secrecy.hide_payload(f"I don't like <{piece}>", sent, ())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("unknown event order.created", "unknown event ****"),
        ("Unknown Event ORDER.CREATED", "Unknown Event ****"),
        ("no such order: 4711", "no such order: ****"),
        ("quantity is required", "quantity is required"),
        ("only 25 of 250 left", "only **** of 250 left"),
        ("is ok, and true", "is ok, and true"),
        ("tenant acme-north", "tenant ****"),
        ("no user ada@example.com", "no user ****"),
    ],
)
def test_errors_stay_useful(make_endpoint: Any, make_message: Any, answer: str, told: str) -> None:
    payload = {"event": "order.created", "order": 4711, "quantity": 25, "ok": True, "ada@example.com": None, "x": 1}
    message = make_message(payload=json.dumps(payload), headers='{"x-tenant": "acme-north"}')
    endpoint = make_endpoint()

    assert excerpt(endpoint, request.build(endpoint, [message], NOW), answer) == told


@pytest.mark.parametrize("body", [b"[" * 5000, b"no json", b'"' + b"x" * 2_000_000 + b'"'])
def test_what_cannot_be_searched_is_not_quoted(body: bytes) -> None:
    assert secrecy.hide_payload("anything", Request(Profile("http://x/"), [], body), ()) == ""
