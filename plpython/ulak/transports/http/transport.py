"""Delivery over HTTP: builds the request, fetches a token if one is needed, sends, and judges the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ulak.messages import bulkhead
from ulak.messages.delivery import DELIVERED, PERMANENT, RETRYABLE, Endpoint, EndpointConfig, Message, Outcome, Settled
from ulak.transports.http import batch, oauth, request, verdict
from ulak.transports.http import endpoint as endpoints
from ulak.transports.http.client import Client
from ulak.transports.http.model import Endpoint as Receiver
from ulak.transports.http.model import Finished, OAuth2, Request, Settings
from ulak.transports.transport import Ready


class Delivery(NamedTuple):
    """Messages that travel in one request."""

    endpoint: Receiver
    messages: Sequence[Message]
    token: str | None = None
    # The token was refused and is requested again, which happens once per delivery.
    renewed: bool = False
    # If some messages of a batch couldn't be built: all messages that the worker gave, and by id those outcomes.
    given: Sequence[Message] | None = None
    rejected: Mapping[int, Outcome] = {}


class _TokenRequest(NamedTuple):
    auth: OAuth2


def longest(receiver: Receiver) -> float:
    """Seconds until libcurl has given up. A token may have to be fetched, refused and fetched again."""
    return receiver.profile.timeout * (4 if isinstance(receiver.auth, OAuth2) else 1) + 1


class HttpTransport:
    """Implements transports.transport.Transport; an endpoint's target is a model.Endpoint."""

    def __init__(self, client: Client, clock: Callable[[], float], settings: Settings | None = None) -> None:
        """`clock` is the time that requests are signed with, in seconds since 1970."""
        self._client = client
        self._parser = endpoints.Parser(settings)
        self._clock = clock
        self._tokens = oauth.TokenCache()
        self._waiting: dict[OAuth2, list[Delivery]] = {}
        self._settled: list[Settled] = []

    def parse(self, config: EndpointConfig) -> Endpoint:
        receiver = self._parser.parse(config)
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
                try:
                    self._arrive(each, now)
                except Exception as error:
                    self._break_off(each, error)
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
                self._settle(tag, DELIVERED)
            else:
                self._settle(tag, verdict.judge(endpoint, finished, now, tag.messages))
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
        except Exception as error:
            self._build_apart(delivery, now, error)
        else:
            self._client.start(built)

    def _build_apart(self, delivery: Delivery, now: float, error: Exception) -> None:
        """Messages of a batch that can't be built fail; the others travel without them."""

        def build(message: Message) -> Request:
            return request.build(endpoint, [message], now, delivery.token)

        endpoint, messages = delivery.endpoint, delivery.messages
        if len(messages) == 1 and delivery.given is None:
            self._settle(delivery, _outcome(endpoint, bulkhead.fault(error, build)))
            return
        problems: dict[int, Exception] = {}
        for message in messages:
            try:
                build(message)
            except Exception as problem:
                problems[message.id] = problem
        # If each can be built alone, but not all together, they all fail.
        problems = problems or {message.id: error for message in messages}
        rejected = {id: _outcome(endpoint, bulkhead.fault(each, build)) for id, each in problems.items()}
        left = [message for message in messages if message.id not in rejected]
        delivery = delivery._replace(
            messages=left, given=delivery.given or messages, rejected={**delivery.rejected, **rejected}
        )
        if left:
            self._start(delivery, now)
        else:
            self._settle(delivery, DELIVERED)

    def _await_token(self, auth: OAuth2, delivery: Delivery) -> None:
        """One token request for all waiting deliveries, with the proxy and time-out of the first one's endpoint."""
        waiting = self._waiting.setdefault(auth, [])
        waiting.append(delivery)
        if len(waiting) == 1:
            try:
                self._client.start(oauth.token_request(delivery.endpoint, _TokenRequest(auth)))
            except Exception as error:
                self._refuse_token(auth, RETRYABLE, f"config: {bulkhead.kind(error)}")

    def _take_token(self, auth: OAuth2, finished: Finished, now: float) -> None:
        try:
            token = oauth.parse(finished, now)
        except oauth.TokenError as error:
            # Wrong credentials aren't the message's fault.
            self._refuse_token(auth, PERMANENT if finished.kind == "blocked" else RETRYABLE, str(error))
            return
        self._tokens.put(auth, token, now)
        for delivery in self._waiting.pop(auth, []):
            # Not from the cache: a token that has expired on arrival would be requested forever.
            self._start(delivery._replace(token=token.value), now)

    def _refuse_token(self, auth: OAuth2, prefix: str, told: str) -> None:
        for delivery in self._waiting.pop(auth, []):
            self._settle(delivery, verdict.failed(delivery.endpoint, prefix, f"OAuth2 token request: {told}"))

    def _break_off(self, finished: Finished, error: Exception) -> None:
        """An exception while handling one answer must not stop other deliveries."""
        tag = finished.request.tag
        if isinstance(tag, Delivery):
            told = f"network: the answer can't be read: {bulkhead.kind(error)}"
            self._settle(tag, verdict.failed(tag.endpoint, RETRYABLE, told, status=finished.status))
        elif isinstance(tag, _TokenRequest):
            self._refuse_token(tag.auth, RETRYABLE, bulkhead.kind(error))

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        messages = delivery.messages
        if delivery.given is not None:
            failures = {**delivery.rejected, **(outcome.failures or {})}
            if outcome.error is not None:
                failures.update(dict.fromkeys([each.id for each in messages], outcome))
            messages, outcome = delivery.given, outcome._replace(error=None, failures=failures)
        self._settled.append(Settled(delivery.endpoint.config.id, messages, outcome))


def _outcome(endpoint: Receiver, error: str) -> Outcome:
    prefix, _, told = error.partition(" ")
    return verdict.failed(endpoint, prefix, told)
