"""Delivery over HTTP: builds the request, fetches a token if one is needed, sends, and judges the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ulak.delivery import DELIVERED, PERMANENT, RETRYABLE, Endpoint, EndpointConfig, Message, Outcome, Settled
from ulak.http import batch, oauth, request, verdict
from ulak.http import endpoint as endpoints
from ulak.http.client import Client
from ulak.http.model import Endpoint as Receiver
from ulak.http.model import Finished, MessageError, OAuth2, Settings
from ulak.worker.transport import Ready


class Delivery(NamedTuple):
    """Messages that travel in one request, and how far they are."""

    endpoint: Receiver
    messages: Sequence[Message]
    token: str | None = None
    # Set once the token was refused and asked for again: it happens once per delivery.
    renewed: bool = False


class _TokenRequest(NamedTuple):
    auth: OAuth2


def longest(receiver: Receiver) -> float:
    """When libcurl has given up at the latest. A token may have to be fetched, refused and fetched again."""
    return receiver.profile.timeout * (4 if isinstance(receiver.auth, OAuth2) else 1) + 1


class HttpTransport:
    """Implements worker.transport.Transport; an endpoint's target is a model.Endpoint."""

    def __init__(
        self, client: Client, settings: Settings | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._parser = endpoints.Parser(settings)
        self._clock = clock
        self._tokens = oauth.TokenCache()
        self._waiting: dict[OAuth2, list[Delivery]] = {}
        self._settled: list[Settled] = []

    def parse(self, config: EndpointConfig) -> Endpoint:
        receiver = self._parser.parse(
            config.id, config.name, config.config_version, config.keys(), config.signing_secrets, config.secrets
        )
        return config.parsed(receiver.batch_size, longest(receiver), receiver)

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        return batch.group(endpoint.target, messages)

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        receiver: Receiver = endpoint.target
        delivery = Delivery(receiver, messages)
        if isinstance(receiver.auth, OAuth2):
            self._send_with_token(receiver.auth, delivery)
        else:
            self._start(delivery, self._clock())

    def timeout(self) -> float | None:
        return 0.0 if self._settled else self._client.timeout()

    def advance(self, ready: Ready) -> list[Settled]:
        finished = self._client.advance(ready)
        if finished:
            now = self._clock()
            for each in finished:
                self._arrive(each, now)
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        self._client.close()

    def _arrive(self, finished: Finished, now: float) -> None:
        tag = finished.request.tag
        if isinstance(tag, Delivery):
            endpoint = tag.endpoint
            if finished.status == 401 and tag.token is not None and not tag.renewed:
                assert isinstance(endpoint.auth, OAuth2)
                self._tokens.discard(endpoint.auth, tag.token)
                self._send_with_token(endpoint.auth, tag._replace(renewed=True))
            elif finished.status == 200 and finished.kind is None and not endpoint.profile.capture_response:
                # The hot path: nothing to judge.
                self._settled.append(Settled(endpoint.id, tag.messages, DELIVERED))
            else:
                outcome = _judge(endpoint, tag.messages, finished, now)
                self._settled.append(Settled(endpoint.id, tag.messages, outcome))
        elif isinstance(tag, _TokenRequest):
            self._take_token(tag.auth, finished, now)

    def _send_with_token(self, auth: OAuth2, delivery: Delivery) -> None:
        now = self._clock()
        token = self._tokens.get(auth, now)
        if token is None:
            self._await_token(auth, delivery)
        else:
            self._start(delivery._replace(token=token), now)

    def _start(self, delivery: Delivery, now: float) -> None:
        try:
            built = request.build(delivery.endpoint, delivery.messages, now, delivery.token, delivery)
        except MessageError as error:
            self._fail(delivery, PERMANENT, str(error))
            return
        # Whatever a message does to our code, the others' deliveries must go on.
        except Exception as error:
            # Its text might quote what it stumbled over.
            told = f"config: the request can't be built: {type(error).__name__}"
            self._fail(delivery, RETRYABLE, told)
            return
        self._client.start(built)

    def _await_token(self, auth: OAuth2, delivery: Delivery) -> None:
        """One request for all that wait; the first one's endpoint lends its proxy and timeout."""
        waiting = self._waiting.setdefault(auth, [])
        waiting.append(delivery)
        if len(waiting) == 1:
            self._client.start(oauth.token_request(delivery.endpoint, _TokenRequest(auth)))

    def _take_token(self, auth: OAuth2, finished: Finished, now: float) -> None:
        waiting = self._waiting.pop(auth, [])
        try:
            token = oauth.parse(finished, now)
        # Not only TokenError: whatever a token server does to our code, the others' deliveries must go on.
        except Exception as error:
            # Whatever is wrong with the credentials, nothing is wrong with the message.
            prefix = PERMANENT if finished.kind == "blocked" else RETRYABLE
            told = str(error) if isinstance(error, oauth.TokenError) else type(error).__name__
            for delivery in waiting:
                self._fail(delivery, prefix, f"OAuth2 token request: {told}")
            return
        self._tokens.put(auth, token, now)
        for delivery in waiting:
            # Not by way of the cache: a token that is stale on arrival would be asked for without end.
            self._start(delivery._replace(token=token.value), now)

    def _fail(self, delivery: Delivery, prefix: str, error: str) -> None:
        endpoint = delivery.endpoint
        self._settled.append(Settled(endpoint.id, delivery.messages, verdict.failed(endpoint, prefix, error)))


def _judge(endpoint: Receiver, messages: Sequence[Message], finished: Finished, now: float) -> Outcome:
    """Whatever an answer does to our code, the others' deliveries must go on."""
    try:
        return verdict.judge(endpoint, finished, now, messages)
    except Exception as error:
        told = f"network: the answer can't be read: {type(error).__name__}"
        return verdict.failed(endpoint, RETRYABLE, told, status=finished.status)
