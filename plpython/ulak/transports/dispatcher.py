"""Hands each delivery to the transport of its endpoint, and waits for all of them at once.

Together with bulkhead.py it contains errors: no transport can raise an error into the worker's loop, nor settle a
delivery twice.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ulak.messages import bulkhead
from ulak.messages.delivery import RETRYABLE, ConfigError, Endpoint, EndpointConfig, Message, Outcome, Settled
from ulak.transports.transport import Descriptors, Transport

MakeTransport = Callable[[Descriptors], Transport]

# A delivery counts as lost if its transport hasn't settled it this many seconds after the endpoint's longest time,
# which only happens if the transport has a defect. The check runs five times as often.
OVERDUE_SECONDS = 5.0

_LOST = Outcome(f"{RETRYABLE} worker: the transport has lost the delivery")


class _UnderWay(NamedTuple):
    to: Endpoint
    messages: Sequence[Message]
    start: float


class _Member(NamedTuple):
    transport: Transport
    descriptors: Descriptors

    def close(self) -> None:
        with suppress(Exception):
            self.transport.close()
        self.descriptors.close()


class Dispatcher:
    """start() deliveries, step() until each has come back as exactly one Settled."""

    def __init__(self, transports: Mapping[str, MakeTransport], clock: Callable[[], float] = time.monotonic) -> None:
        self._makers = transports
        self._clock = clock
        self._epoll = select.epoll()
        self._members: dict[str, _Member] = {}
        # By id and attempt of the first message. The id alone won't do: a message whose lease was lost may come again.
        self._under_way: dict[tuple[int, int], _UnderWay] = {}
        # Deliveries that failed before their transport took them over.
        self._not_started: list[Settled] = []
        self._next_look = clock()
        self._wake_up: int | None = None
        # The wake-up could be read when the last step ended.
        self.was_woken = False

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def last_end(self) -> float:
        """When all deliveries under way will have ended."""
        return max((each.start + each.to.longest for each in self._under_way.values()), default=0.0)

    def under_way_since(self, time: float) -> set[int]:
        """Endpoints with a delivery that was under way before this time."""
        return {each.to.id for each in self._under_way.values() if each.start < time}

    def wait_also_for(self, descriptor: int) -> None:
        """step() also ends when this can be read."""
        if descriptor != self._wake_up:
            self._wake_up = descriptor
            self._epoll.register(descriptor, select.EPOLLIN)

    def parse(self, config: EndpointConfig) -> Endpoint:
        """Raises ConfigError, and no other exception, if the config can't be parsed."""
        try:
            return self._transport(config.protocol).parse(config)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"it can't be read: {bulkhead.kind(error)}") from None

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        """Groups messages that are sent together."""
        if endpoint.batch_size > 1:
            # If a message can't be grouped, all are started singly, and only that one fails.
            with suppress(Exception):
                return self._transport(endpoint.protocol).group(endpoint, messages)
        return [[message] for message in messages]

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """One delivery: one message, or one group of group()."""
        first = messages[0]
        self._under_way[first.id, first.attempt] = _UnderWay(endpoint, messages, self._clock())
        try:
            self._transport(endpoint.protocol).start(endpoint, messages)
        except Exception as error:
            self._not_started.append(bulkhead.broken(endpoint.id, messages, error))

    def step(self, max_wait: float) -> list[Settled]:
        """Waits for at most max_wait seconds. Returns the deliveries that ended."""
        settled, self._not_started = self._not_started, []
        wait = max_wait
        for protocol, member in list(self._members.items()):
            try:
                # Also without deliveries in flight: a transport's connections may have heartbeats to send.
                left = member.transport.timeout()
                if left == 0:
                    settled += member.transport.advance(member.descriptors.ready())
                    left = member.transport.timeout()
                if left is not None and left < wait:
                    wait = left
            except Exception as error:
                self._give_up(protocol, error, settled)
        ready = [descriptor for descriptor, _ in self._epoll.poll(0 if settled else wait)]
        self.was_woken = self._wake_up in ready
        for protocol, member in list(self._members.items()) if len(ready) > self.was_woken else ():
            if member.descriptors.fileno() in ready:
                try:
                    settled += member.transport.advance(member.descriptors.ready())
                except Exception as error:
                    self._give_up(protocol, error, settled)
        return self._end(settled)

    def close(self) -> None:
        for member in self._members.values():
            member.close()
        self._epoll.close()

    def _end(self, settled: list[Settled]) -> list[Settled]:
        now = self._clock()
        if now >= self._next_look:
            # Overdue deliveries fail, so that no message is held forever if its transport loses it.
            self._next_look = now + OVERDUE_SECONDS / 5
            for to, messages, start in self._under_way.values():
                if start + to.longest + OVERDUE_SECONDS <= now:
                    settled.append(Settled(to.id, messages, _LOST))
        ended = []
        for endpoint_id, messages, outcome, _ in settled:
            known = self._under_way.pop((messages[0].id, messages[0].attempt), None)
            # Only the first outcome of a delivery counts.
            if known is not None:
                ended.append(Settled(endpoint_id, messages, outcome, now - known.start))
        return ended

    def _give_up(self, protocol: str, error: Exception, settled: list[Settled]) -> None:
        """After an error the state of the transport's deliveries is unknown, so all of them fail. The next delivery
        makes a new transport."""
        self._members.pop(protocol).close()
        for to, messages, _ in self._under_way.values():
            if to.protocol == protocol:
                settled.append(bulkhead.broken(to.id, messages, error))

    def _transport(self, protocol: str) -> Transport:
        """Made for the first endpoint of its protocol, so a worker without HTTP endpoints needn't load libcurl."""
        member = self._members.get(protocol)
        if member is None:
            make = self._makers.get(protocol)
            if make is None:
                raise ConfigError(f"no worker delivers protocol {protocol}")
            descriptors = Descriptors()
            member = self._members[protocol] = _Member(make(descriptors), descriptors)
            self._epoll.register(descriptors, select.EPOLLIN)
        return member.transport
