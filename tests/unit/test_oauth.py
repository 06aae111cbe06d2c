"""OAuth2 client credentials, with a real token server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deliveries import Deliveries, settle_all
from support.receiver import Answer, Received, Receiver
from ulak.messages.delivery import EndpointConfig, Settled
from ulak.safety.address import Guard
from ulak.transports.http import endpoint, oauth
from ulak.transports.http.model import Finished, Message, OAuth2, Profile, Request

REQUEST = Request(Profile("http://example.com/"), [], b"")
AUTH = OAuth2("http://example.com/token", "id", "secret")


class TokenServer(Receiver):
    """Gives token-1, token-2 and so on."""

    def __init__(self, **answer: Any) -> None:
        self.given = 0
        self.extra = {"expires_in": 3600, **answer}
        super().__init__(self.give)

    def give(self, request: Received) -> Answer:
        self.given += 1
        body = {"access_token": f"token-{self.given}", "token_type": "Bearer", **self.extra}
        return Answer(body=json.dumps(body).encode())


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    server = TokenServer()
    yield server
    server.close()


Deliver = Callable[..., list[Settled]]


@pytest.fixture
def deliver(receiver: Receiver, make_endpoint: Any, make_message: Any) -> Deliver:
    """Sends this many messages with one transport and returns how they ended."""
    endpoints: dict[str, Any] = {}
    clock: dict[str, float | None] = {}
    deliveries = Deliveries(clock=lambda: clock["now"] or time.time())

    def run(token_url: str, count: int = 1, now: float | None = None) -> list[Settled]:
        clock["now"] = now
        auth = {"type": "oauth2", "token_url": token_url, "client_id": "a b", "client_secret": "s&t", "scope": "x y"}
        endpoint = endpoints.setdefault(token_url, make_endpoint(receiver.url, auth=auth))
        for number in range(count):
            deliveries.send(endpoint, [make_message(number)])
        return settle_all(deliveries)

    return run


def sent_tokens(receiver: Receiver) -> list[str]:
    return [each.headers["authorization"] for each in receiver.requests]


def test_the_token_request_is_what_the_specification_asks_for(deliver: Deliver, tokens: TokenServer) -> None:
    deliver(tokens.url)

    (asked,) = tokens.requests
    assert asked.method == "POST"
    assert asked.headers["content-type"] == "application/x-www-form-urlencoded"
    # base64 of "a+b:s%26t"
    assert asked.headers["authorization"] == "Basic YStiOnMlMjZ0"
    assert asked.body == b"grant_type=client_credentials&scope=x+y"


def test_one_token_serves_all_that_wait_and_those_that_come_later(
    deliver: Deliver, tokens: TokenServer, receiver: Receiver
) -> None:
    settled = deliver(tokens.url, 20) + deliver(tokens.url, 5)

    assert [each.outcome.error for each in settled] == [None] * 25
    assert sent_tokens(receiver) == ["Bearer token-1"] * 25
    assert tokens.given == 1


def test_a_refused_token_is_renewed_once_and_the_message_sent_again(
    deliver: Deliver, tokens: TokenServer, receiver: Receiver
) -> None:
    receiver.answer = lambda got: Answer(401 if got.headers["authorization"] == "Bearer token-1" else 200)

    (settled,) = deliver(tokens.url)

    assert settled.outcome.error is None
    assert sent_tokens(receiver) == ["Bearer token-1", "Bearer token-2"]


def test_many_refusals_of_one_token_ask_for_one_new_token(
    deliver: Deliver, tokens: TokenServer, receiver: Receiver
) -> None:
    receiver.answer = lambda got: Answer(401 if got.headers["authorization"] == "Bearer token-1" else 200)

    settled = deliver(tokens.url, 10)

    assert [each.outcome.error for each in settled] == [None] * 10
    assert tokens.given == 2


def test_a_receiver_that_refuses_every_token_gets_its_way(
    deliver: Deliver, tokens: TokenServer, receiver: Receiver
) -> None:
    receiver.answer = Answer(401)

    (settled,) = deliver(tokens.url)

    assert settled.outcome.error == "[PERMANENT] HTTP 401"
    assert (len(receiver.requests), tokens.given) == (2, 2)


def test_a_token_is_asked_for_again_shortly_before_it_expires(deliver: Deliver, tokens: TokenServer) -> None:
    for now in (1000.0, 1000.0 + 3600 - 31, 1000.0 + 3600 - 29):
        deliver(tokens.url, now=now)

    assert tokens.given == 2


def test_a_token_that_is_stale_on_arrival_is_used_once(deliver: Deliver, receiver: Receiver) -> None:
    with TokenServer(expires_in=0) as server:
        settled = deliver(server.url, 3)

    assert [each.outcome.error for each in settled] == [None] * 3
    assert sent_tokens(receiver) == ["Bearer token-1"] * 3


def test_without_a_token_nothing_is_sent_and_the_message_is_retried(deliver: Deliver, receiver: Receiver) -> None:
    with Receiver(Answer(400, body=b'{"error": "invalid_client", "hint": "s&t"}')) as refusing:
        settled = deliver(refusing.url, 3)

    errors = {each.outcome.error for each in settled}
    assert errors == {"[RETRYABLE] OAuth2 token request: HTTP 400: invalid_client"}
    assert receiver.requests == []


def test_a_failed_token_request_is_made_again_for_the_next_message(deliver: Deliver, receiver: Receiver) -> None:
    with TokenServer() as server:
        good = server.answer
        server.answer = Answer(500)
        (failed,) = deliver(server.url)
        server.answer = good
        (delivered,) = deliver(server.url)

    assert failed.outcome.error is not None
    assert delivered.outcome.error is None


def test_a_token_url_on_a_blocked_address_is_not_dialled(make_endpoint: Any, tokens: TokenServer) -> None:
    deliveries = Deliveries(Guard())
    auth = {"type": "oauth2", "token_url": tokens.url, "client_id": "a", "client_secret": "b"}

    deliveries.send(make_endpoint("http://example.com/", auth=auth), [Message(1, "id", 1, "{}")])
    (settled,) = settle_all(deliveries)

    assert settled.outcome.error == (
        "[PERMANENT] OAuth2 token request: blocked: address 127.0.0.1 is blocked (loopback, 127.0.0.0/8); to allow it: "
        "select ulak.configure('http_allowed_networks', '127.0.0.0/8');"
    )
    assert tokens.connections == 0
    deliveries.close()


@given(
    status=st.sampled_from([200, 201, 204, 302, 400, 500]),
    body=st.binary()
    | st.builds(
        lambda fields: json.dumps(fields).encode(),
        st.dictionaries(
            st.sampled_from(["access_token", "expires_in", "error"]),
            st.none() | st.text() | st.integers() | st.floats() | st.lists(st.integers()),
        ),
    ),
)
def test_any_answer_is_a_usable_token_or_a_token_error(status: int, body: bytes) -> None:
    try:
        token = oauth.parse(Finished(REQUEST, status, body=body), 1000)
    except oauth.TokenError:
        return

    assert status < 300
    assert token.value.isprintable() and token.value.isascii() and " " not in token.value
    assert 1000 <= token.good_until <= 1000 + 86400


def test_expired_tokens_leave_the_cache() -> None:
    cache = oauth.TokenCache()
    for number in range(100):
        now = number * 1000.0
        cache.put(OAuth2("u", "id", f"secret {number}"), oauth.Token("t", now + 500), now)

    assert len(cache._tokens) == 1


def test_a_late_refusal_of_an_old_token_keeps_the_new_one() -> None:
    cache = oauth.TokenCache()
    cache.put(AUTH, oauth.Token("new", 2000), 1000)

    cache.discard(AUTH, "old")

    assert cache.get(AUTH, 1000) == "new"


def form(auth: dict[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    config = {"url": "http://example.com/", "auth": {"type": "oauth2", "token_url": "http://example.com/t", **auth}}
    asked = oauth.token_request(endpoint.parse(EndpointConfig(1, "a", 1, config)))
    return parse_qs(asked.body.decode()), [str(line).partition(":")[0] for line in asked.headers]


def test_an_audience_and_credentials_in_the_body_are_asked_for_as_the_config_says() -> None:
    client = {"client_id": "me", "client_secret": "s & t", "audience": "https://api.example"}
    common = {"grant_type": ["client_credentials"], "audience": ["https://api.example"]}

    in_body, body_headers = form({**client, "credentials": "body"})
    in_header, header_headers = form(client)

    assert in_body == {**common, "client_id": ["me"], "client_secret": ["s & t"]}
    assert in_header == common
    assert ("authorization" in body_headers, "authorization" in header_headers) == (False, True)
