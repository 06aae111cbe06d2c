"""Delivery to brokers: one connection for each endpoint, kept and reused."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from ulak.messages.delivery import Endpoint, EndpointConfig, Message, Settled, grouped
from ulak.safety.address import Guard
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.link import Link, Surroundings
from ulak.transports.broker.target import Defaults, Target
from ulak.transports.transport import READABLE, Descriptors, Ready

# Bytes of payload in one delivery: more might not be acknowledged within the delivery's time-out.
MAX_BYTES = 1024 * 1024
# At the end of a run, seconds to wait until all brokers have confirmed the end of their connections.
FAREWELL_SECONDS = 0.1


class BrokerTransport:
    """Implements transports.transport.Transport."""

    def __init__(
        self,
        target: type[Target],
        link: type[Link],
        descriptors: Descriptors,
        guard: Guard,
        defaults: Defaults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`target` parses a config of the protocol, and `link` is its connection."""
        self._target = target
        self._link = link
        self._defaults = defaults
        self._descriptors = descriptors
        self._guard = guard
        self._clock = clock
        self._settled: list[Settled] = []
        # By endpoint; the most recently used one comes last.
        self._connections: dict[int, Link] = {}
        # Connections with an earlier config that still have deliveries in flight.
        self._leaving: set[Link] = set()
        # By descriptor.
        self._owners: dict[int, Link] = {}

    def parse(self, config: EndpointConfig) -> Endpoint:
        target = self._target(config, self._defaults)
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
        times = [each.guarded(each.next_deadline) for each in (*self._connections.values(), *self._leaving)]
        first = min((each for each in times if each is not None), default=None)
        return None if first is None else max(0.0, first - self._clock())

    def advance(self, ready: Ready) -> list[Settled]:
        for descriptor, events in ready:
            owner = self._owners.get(descriptor)
            if owner is not None:
                owner.guarded(partial(owner.advance, descriptor, events))
        now = self._clock()
        for each in [*self._connections.values(), *self._leaving]:
            deadline = each.guarded(each.next_deadline)
            if deadline is not None and deadline <= now:
                each.guarded(each.pass_time)
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
            # An idle connection isn't read, so the broker may have closed it unnoticed.
            known.guarded(partial(known.ready, READABLE))
        if known is not None and (known.is_lost or known.endpoint.config_version != endpoint.config_version):
            if not known.is_lost:
                self._leaving.add(known)
            known = None
        if known is None:
            self._close_idle()
            guard = self._guard.within(endpoint.bound)
            surroundings = Surroundings(
                self._descriptors, self._owners, guard, self._clock, self._settled, self._defaults.version
            )
            known = self._link(endpoint, surroundings)
        self._connections[endpoint.id] = known
        return known

    def _close_idle(self) -> None:
        if len(self._connections) >= self._link.most_links:
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


def _leave(connection: Link) -> int | None:
    with suppress(Exception):
        return connection.leave()
    return None


def _close(connection: Link) -> None:
    with suppress(Exception):
        connection.close()


def _await_answers(descriptors: Iterable[int | None]) -> None:
    """A broker logs a failure if the client doesn't wait for its answer. All of them together get FAREWELL_SECONDS."""
    poll = select.poll()
    left = {each for each in descriptors if each is not None}
    for each in left:
        poll.register(each, select.POLLIN)
    until = time.monotonic() + FAREWELL_SECONDS
    while left and (seconds := until - time.monotonic()) > 0:
        for each, _ in poll.poll(seconds * 1000):
            poll.unregister(each)
            left.discard(each)
