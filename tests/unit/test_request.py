"""What a request carries, and which headers a message may set."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.messages.delivery import EndpointConfig
from ulak.transports.http import endpoint as endpoints
from ulak.transports.http import header, request
from ulak.transports.http.model import Message, MessageError, Request, Settings

NOW = 1_800_000_000.7


def headers(built: Request) -> dict[str, str]:
    names = [header.split(line)[0] for line in built.headers]
    assert len(names) == len(set(names)), "a header is sent twice"
    return dict(header.split(line) for line in built.headers)


def test_a_plain_message_carries_its_id_its_time_and_its_attempt(make_endpoint: Any, make_message: Any) -> None:
    built = request.build(make_endpoint(), [make_message(5, attempt=3)], NOW)

    assert built.body == b'{"order": 1}'
    assert headers(built) == {
        "user-agent": "ulak",
        "content-type": "application/json",
        "webhook-id": "0190a5d2-5b9e-7000-8000-000000000005",
        "webhook-timestamp": "1800000000",
        "ulak-attempt": "3",
    }


def test_the_short_way_and_the_long_way_build_the_same_request(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(secrets=["a plain secret"], auth={"type": "bearer", "token": "t"}, headers={"X-A": "b"})

    short = request.build(endpoint, [make_message()], NOW)
    long = request.build(endpoint, [make_message(headers="{}")], NOW)

    assert headers(short) == headers(long)
    assert short.body == long.body
    assert "webhook-signature" in headers(short)


def test_correlation_id_and_traceparent_travel_along(make_endpoint: Any, make_message: Any) -> None:
    message = make_message(correlation_id="c-1", headers=json.dumps({"traceparent": "00-a-b-01"}))

    sent = headers(request.build(make_endpoint(), [message], NOW))

    assert sent["x-correlation-id"] == "c-1"
    assert sent["traceparent"] == "00-a-b-01"


def test_a_messages_header_replaces_the_endpoints(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(headers={"X-Tenant": "one", "X-Kept": "yes"})
    message = make_message(headers=json.dumps({"x-tenant": "two", "User-Agent": "mine", "X-Empty": ""}))

    sent = headers(request.build(endpoint, [message], NOW))

    assert (sent["x-tenant"], sent["x-kept"], sent["user-agent"], sent["x-empty"]) == ("two", "yes", "mine", "")


@pytest.mark.parametrize("name", sorted(header.RESERVED))
def test_a_reserved_header_of_a_message_has_no_effect(make_endpoint: Any, make_message: Any, name: str) -> None:
    endpoint = make_endpoint(secrets=["a plain secret"])
    plain = headers(request.build(endpoint, [make_message()], NOW))

    sent = headers(request.build(endpoint, [make_message(headers=json.dumps({name.title(): "forged"}))], NOW))

    assert sent == plain


def test_a_message_cannot_replace_the_endpoints_authorization(make_endpoint: Any, make_message: Any) -> None:
    message = make_message(headers=json.dumps({"Authorization": "forged"}))
    endpoint = make_endpoint(auth={"type": "basic", "username": "ada", "password": "secret:x"})

    assert headers(request.build(endpoint, [message], NOW))["authorization"] == "Basic YWRhOnNlY3JldDp4"
    assert headers(request.build(make_endpoint(), [message], NOW))["authorization"] == "forged"
    # What was read of a message for one endpoint holds for the next one.
    assert headers(request.build(endpoint, [message], NOW))["authorization"] == "Basic YWRhOnNlY3JldDp4"


def test_a_token_and_a_sigv4_signature_become_the_authorization(make_endpoint: Any, make_message: Any) -> None:
    sigv4 = {"type": "aws_sigv4", "access_key": "a", "secret_key": "b", "region": "r", "service": "s"}
    signed = headers(request.build(make_endpoint(auth=sigv4), [make_message()], NOW))
    with_token = headers(request.build(make_endpoint(), [make_message()], NOW, token="tok"))

    assert "SignedHeaders=content-type;host;x-amz-date," in signed["authorization"]
    assert signed["x-amz-date"] == "20270115T080000Z"
    assert with_token["authorization"] == "Bearer tok"


@pytest.mark.parametrize(
    "given_headers",
    [
        '{"X-A": "b\\r\\nX-Evil: 1"}',
        '{"X-A\\n": "b"}',
        '{"": "b"}',
        '{"X A": "b"}',
        '{"X-A": 1}',
        "[]",
        '{"X": "\\u0000"}',
    ],
)
def test_a_header_that_could_smuggle_another_is_refused(
    make_endpoint: Any, make_message: Any, given_headers: str
) -> None:
    with pytest.raises(MessageError):
        request.build(make_endpoint(), [make_message(headers=given_headers)], NOW)


@given(st.dictionaries(st.text(), st.text(st.characters(codec="utf-8"))))
def test_no_header_of_a_message_adds_a_line_or_replaces_a_reserved_one(own: dict[str, str]) -> None:
    target = endpoints.parse(EndpointConfig(1, "orders", 1, {"url": "http://example.com/"}, ["a plain secret"]))
    plain = headers(request.build(target, [Message(1, "id", 1, "{}")], NOW))

    try:
        built = request.build(target, [Message(1, "id", 1, "{}", json.dumps(own))], NOW)
    except MessageError:
        return

    for line in built.headers:
        text = line if isinstance(line, bytes) else line.encode()
        assert b"\r" not in text and b"\n" not in text and b"\0" not in text
    sent = headers(built)
    assert {name: sent[name] for name in header.RESERVED & plain.keys()} == {
        name: plain[name] for name in header.RESERVED & plain.keys()
    }


def test_a_value_beyond_ascii_is_sent_as_utf_8(make_endpoint: Any, make_message: Any) -> None:
    built = request.build(make_endpoint(), [make_message(headers='{"X-Name": "\\u00e7"}')], NOW)

    assert "X-Name: ç".encode() in built.headers


def test_the_user_agent_names_the_version(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(settings=Settings(user_agent="ulak/1.2"))

    assert headers(request.build(endpoint, [make_message()], NOW))["user-agent"] == "ulak/1.2"


# What is particular to one request.


@pytest.mark.parametrize(
    ("url", "path", "expected"),
    [
        ("https://a.example", "orders", "https://a.example/orders"),
        ("https://a.example/", "/orders", "https://a.example/orders"),
        ("https://a.example/v1", "orders/5", "https://a.example/v1/orders/5"),
        ("https://a.example/v1/", "/orders/5/", "https://a.example/v1/orders/5/"),
        ("https://a.example/v1?k=1", "orders?l=2", "https://a.example/v1/orders?k=1&l=2"),
        ("https://a.example/v1?k=1", "?l=2", "https://a.example/v1?k=1&l=2"),
        ("https://a.example?k=1", "orders", "https://a.example/orders?k=1"),
        ("https://a.example", "?l=2", "https://a.example/?l=2"),
        # Refused by send(); nothing leads to another host even so.
        ("https://a.example", "//b.example/", "https://a.example/b.example/"),
        ("https://a.example", "@b.example", "https://a.example/@b.example"),
    ],
)
def test_a_path_is_appended_to_the_url(
    make_endpoint: Any, make_message: Any, url: str, path: str, expected: str
) -> None:
    message = make_message(headers=json.dumps({":path": path, "x-a": "b"}))

    built = request.build(make_endpoint(url=url), [message], 0)

    assert built.profile.url == expected
    assert not [line for line in built.headers if ":path" in str(line)]
    assert "x-a: b" in built.headers


def test_a_time_out_is_at_most_the_endpoints(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(timeout=5, connect_timeout=3)
    times = []
    for timeout in ("2.5", "10"):
        profile = request.build(endpoint, [make_message(headers=json.dumps({":timeout": timeout}))], 0).profile
        times.append((profile.timeout, profile.connect_timeout))

    assert times == [(2.5, 2.5), (5, 3)]


def test_a_raw_body_is_sent_byte_for_byte(make_endpoint: Any, make_message: Any) -> None:
    text = '{ "b": 1,\t"a": "Ç\\u00e7" }\r\n'
    message = make_message(payload=json.dumps(text), headers='{":body": "raw", "content-type": "text/x"}')

    built = request.build(make_endpoint(), [message], 0)

    assert built.body == text.encode()
    assert [line for line in built.headers if str(line).startswith("content-type")] == ["content-type: text/x"]


def test_the_signature_of_aws_covers_the_messages_path(make_endpoint: Any, make_message: Any) -> None:
    auth = {"type": "aws_sigv4", "access_key": "A", "secret_key": "s", "region": "eu-west-1", "service": "x"}
    endpoint = make_endpoint(auth=auth)

    def signed(headers: str | None) -> str:
        lines = dict(header.split(line) for line in request.build(endpoint, [make_message(headers=headers)], 0).headers)
        return lines["authorization"]

    assert signed('{":path": "a"}') != signed('{":path": "b"}') != signed(None)


# Signatures of the body alone. The vector is from GitHub's documentation.


def test_githubs_own_example_of_a_signature(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(signing_secret="It's a Secret to Everybody", signature={"scheme": "github"})
    message = make_message(payload=json.dumps("Hello, World!"), headers='{":body": "raw"}')

    lines = dict(header.split(line) for line in request.build(endpoint, [message], 0).headers)

    assert lines["x-hub-signature-256"] == "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert "webhook-signature" not in lines
    assert "webhook-id" in lines


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha512"])
@pytest.mark.parametrize("encoding", ["hex", "base64"])
def test_a_plain_signature_is_made_as_the_config_says(
    make_endpoint: Any, make_message: Any, algorithm: str, encoding: str
) -> None:
    scheme = {"scheme": "hmac", "header": "X-Mac", "prefix": "v=", "encoding": encoding, "algorithm": algorithm}
    endpoint = make_endpoint(signing_secret="whsec_as it is written", signature=scheme)

    lines = dict(header.split(line) for line in request.build(endpoint, [make_message(payload="{}")], 0).headers)

    made = hmac.new(b"whsec_as it is written", b"{}", algorithm).digest()
    assert lines["x-mac"] == "v=" + (made.hex() if encoding == "hex" else base64.b64encode(made).decode())
