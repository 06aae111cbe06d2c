"""From message to outcome: builds the request, fetches a token if one is needed, sends, and judges the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ulak import oauth, request, verdict
from ulak.http import Transport
from ulak.model import Endpoint, Finished, Message, MessageError, OAuth2, Outcome


class Delivery(NamedTuple):
    """Messages that travel in one request, and how far they are."""

    endpoint: Endpoint
    messages: Sequence[Message]
    token: str | None = None
    # Set once the token was refused and asked for again: it happens once per delivery.
    renewed: bool = False


class Settled(NamedTuple):
    endpoint_id: int
    messages: Sequence[Message]
    outcome: Outcome


class _TokenRequest(NamedTuple):
    auth: OAuth2


class Courier:
    """send() messages, step() until each delivery has come back as exactly one Settled."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.time) -> None:
        self._transport = transport
        self._clock = clock
        self._tokens = oauth.TokenCache()
        self._waiting: dict[OAuth2, list[Delivery]] = {}
        self._settled: list[Settled] = []
        # Deliveries, not requests: those that wait for a token count too.
        self.in_flight = 0

    def wake_on(self, descriptor: int) -> None:
        """step() also ends when this can be read; was_woken tells."""
        self._transport.wake_on(descriptor)

    @property
    def was_woken(self) -> bool:
        return self._transport.was_woken

    def send(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """Starts one delivery: one message, or one group of batch.group()."""
        self.in_flight += 1
        delivery = Delivery(endpoint, messages)
        if isinstance(endpoint.auth, OAuth2):
            self._send_with_token(endpoint.auth, delivery)
        else:
            self._start(delivery, self._clock())

    def step(self, max_wait: float) -> list[Settled]:
        """Deliveries that ended, after at most max_wait seconds (and 0.1)."""
        finished = self._transport.step(0 if self._settled else max_wait)
        if finished:
            now = self._clock()
            for each in finished:
                self._arrive(each, now)
        settled = self._settled
        if settled:
            self._settled = []
            self.in_flight -= len(settled)
        return settled

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
                self._settled.append(Settled(endpoint.id, tag.messages, verdict.DELIVERED))
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
            self._fail(delivery, verdict.PERMANENT, str(error))
            return
        # Whatever a message does to our code, the others' deliveries must go on.
        except Exception as error:
            # Its text might quote what it stumbled over.
            told = f"config: the request can't be built: {type(error).__name__}"
            self._fail(delivery, verdict.RETRYABLE, told)
            return
        self._transport.start(built)

    def _await_token(self, auth: OAuth2, delivery: Delivery) -> None:
        """One request for all that wait; the first one's endpoint lends its proxy and timeout."""
        waiting = self._waiting.setdefault(auth, [])
        waiting.append(delivery)
        if len(waiting) == 1:
            self._transport.start(oauth.token_request(delivery.endpoint, _TokenRequest(auth)))

    def _take_token(self, auth: OAuth2, finished: Finished, now: float) -> None:
        waiting = self._waiting.pop(auth, [])
        try:
            token = oauth.parse(finished, now)
        # Not only TokenError: whatever a token server does to our code, the others' deliveries must go on.
        except Exception as error:
            # Whatever is wrong with the credentials, nothing is wrong with the message.
            prefix = verdict.PERMANENT if finished.kind == "blocked" else verdict.RETRYABLE
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


def _judge(endpoint: Endpoint, messages: Sequence[Message], finished: Finished, now: float) -> Outcome:
    """Whatever an answer does to our code, the others' deliveries must go on."""
    try:
        return verdict.judge(endpoint, finished, now, messages)
    except Exception as error:
        told = f"network: the answer can't be read: {type(error).__name__}"
        return verdict.failed(endpoint, verdict.RETRYABLE, told, status=finished.status)
