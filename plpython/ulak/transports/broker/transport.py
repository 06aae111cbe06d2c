"""Implements worker/transport.py over connections to brokers: one for each endpoint, kept and reused."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ulak.messages.delivery import Endpoint, EndpointConfig, Message, Settled, grouped
from ulak.safety.address import Guard
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.link import Link, Surroundings
from ulak.worker.transport import Ready
from ulak.worker.waiting import READABLE, Descriptors

# Payload in one delivery: more of it might not be acknowledged within the delivery's timeout.
MAX_BYTES = 1024 * 1024
# How long the end of a run waits for brokers to answer the end of their connections, for all of them together.
FAREWELL_SECONDS = 0.1
# Beyond this many, idle connections are closed.
MOST_CONNECTIONS = 200

Result = TypeVar("Result")


class Target(Protocol):
    """A config as a protocol has parsed it."""

    @property
    def timeout(self) -> float:
        """Seconds that a delivery may take, the connection included."""

    @property
    def batch_size(self) -> int:
        """Messages that one delivery may carry."""


class Defaults(NamedTuple):
    """What brokers are told, and what holds for endpoints that say nothing else."""

    version: str
    timeout: float
    cloudevents_source: str


class BrokerTransport(ABC):
    """Implements worker.transport.Transport."""

    def __init__(
        self,
        descriptors: Descriptors,
        guard: Guard,
        defaults: Defaults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.defaults = defaults
        self._descriptors = descriptors
        self._guard = guard
        self._clock = clock
        self._settled: list[Settled] = []
        # By endpoint, the one that was used last at the end.
        self._connections: dict[int, Link] = {}
        # Connections with an earlier config that still have something under way.
        self._leaving: set[Link] = set()
        # By descriptor.
        self._owners: dict[int, Link] = {}

    @property
    def most_connections(self) -> int:
        """Beyond this many, idle ones are closed."""
        return MOST_CONNECTIONS

    @abstractmethod
    def target(self, config: EndpointConfig) -> Target:
        """Raises ConfigError."""

    @abstractmethod
    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Link:
        """Begins to dial."""

    def parse(self, config: EndpointConfig) -> Endpoint:
        target = self.target(config)
        return config.parsed(target.batch_size, target.timeout + 1, target)

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        return grouped(messages, endpoint.batch_size, MAX_BYTES)

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        target: Target = endpoint.target
        delivery = Delivery(endpoint, messages, self._clock() + target.timeout)
        self._connection(endpoint).deliver(delivery)

    def timeout(self) -> float | None:
        if self._settled:
            return 0.0
        times = [_guarded(each, each.next_deadline) for each in (*self._connections.values(), *self._leaving)]
        first = min((each for each in times if each is not None), default=None)
        return None if first is None else max(0.0, first - self._clock())

    def advance(self, ready: Ready) -> list[Settled]:
        for descriptor, events in ready:
            owner = self._owners.get(descriptor)
            if owner is not None:
                _guarded(owner, partial(owner.advance, events))
        now = self._clock()
        for each in [*self._connections.values(), *self._leaving]:
            deadline = _guarded(each, each.next_deadline)
            if deadline is not None and deadline <= now:
                _guarded(each, each.pass_time)
            if each.is_lost or (each in self._leaving and each.is_idle):
                self._forget(each)
        settled = list(self._settled)
        # Cleared and not replaced: the connections append to this very list.
        self._settled.clear()
        return settled

    def close(self) -> None:
        connections = [*self._connections.values(), *self._leaving]
        _await_answers([_leave(each) for each in connections])
        for each in connections:
            _close(each)

    def _connection(self, endpoint: Endpoint) -> Link:
        known = self._connections.pop(endpoint.id, None)
        if known is not None and known.is_idle:
            # While nothing was under way nobody looked whether the broker has closed it.
            known.advance(READABLE)
        if known is not None and (known.is_lost or known.endpoint.config_version != endpoint.config_version):
            if not known.is_lost:
                self._leaving.add(known)
            known = None
        if known is None:
            self._close_idle()
            own = _Own(self._descriptors, self._owners)
            guard = self._guard.within(endpoint.bound)
            surroundings = Surroundings(own, guard, self._clock, self._settled)
            known = self.connect(endpoint, surroundings)
            own.belong_to(known)
        self._connections[endpoint.id] = known
        return known

    def _close_idle(self) -> None:
        if len(self._connections) >= self.most_connections:
            for endpoint_id, each in self._connections.items():
                if each.is_idle:
                    _close(each)
                    del self._connections[endpoint_id]
                    return

    def _forget(self, connection: Link) -> None:
        _close(connection)
        self._leaving.discard(connection)
        if self._connections.get(connection.endpoint.id) is connection:
            del self._connections[connection.endpoint.id]


class _Own:
    """The descriptors of one connection among those of its transport."""

    def __init__(self, descriptors: Descriptors, owners: dict[int, Link]) -> None:
        self._descriptors = descriptors
        self._owners = owners
        self._owner: Link | None = None
        # Descriptors that it watches from its constructor, when nobody can name it as their owner yet.
        self._early: set[int] = set()

    def belong_to(self, owner: Link) -> None:
        self._owner = owner
        for descriptor in self._early:
            self._owners[descriptor] = owner
        self._early.clear()

    def watch(self, descriptor: int, events: int) -> None:
        self._descriptors.watch(descriptor, events)
        if self._owner is None:
            self._early.add(descriptor)
        else:
            self._owners[descriptor] = self._owner

    def forget(self, descriptor: int) -> None:
        self._descriptors.forget(descriptor)
        self._early.discard(descriptor)
        self._owners.pop(descriptor, None)


def _guarded(connection: Link, step: Callable[[], Result]) -> Result | None:
    """An error in one connection ends that connection and no other."""
    try:
        return step()
    except Exception as error:
        connection.break_off(error)
        return None


def _leave(connection: Link) -> int | None:
    with suppress(Exception):
        return connection.leave()
    return None


def _close(connection: Link) -> None:
    with suppress(Exception):
        connection.close()


def _await_answers(descriptors: Iterable[int | None]) -> None:
    """A broker whose answer to the end isn't awaited takes it for a failure, and logs it. All of them together are
    given a moment, and no more."""
    poll = select.poll()
    left = {each for each in descriptors if each is not None}
    for each in left:
        poll.register(each, select.POLLIN)
    until = time.monotonic() + FAREWELL_SECONDS
    while left and (seconds := until - time.monotonic()) > 0:
        for each, _ in poll.poll(seconds * 1000):
            poll.unregister(each)
            left.discard(each)
