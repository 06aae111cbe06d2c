"""Hands each delivery to the transport of its endpoint, and waits for all of them at once.

Together with bulkhead.py it contains errors: no transport can raise an error into the worker's loop, nor settle a
delivery twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ulak.messages import bulkhead
from ulak.messages.delivery import RETRYABLE, ConfigError, Endpoint, EndpointConfig, Message, Outcome, Settled
from ulak.worker.epoll import Descriptors, Waiting
from ulak.worker.transport import Transport
from ulak.worker.tuning import CHECK_SECONDS, OVERDUE_SECONDS

MakeTransport = Callable[[Descriptors], Transport]


_LOST = Outcome(f"{RETRYABLE} worker: the transport has lost the delivery")


class _UnderWay(NamedTuple):
    endpoint_id: int
    messages: Sequence[Message]
    # The transport must have settled it by then.
    until: float


class _Member:
    __slots__ = ("descriptors", "transport", "under_way")

    def __init__(self, descriptors: Descriptors, transport: Transport) -> None:
        self.descriptors = descriptors
        self.transport = transport
        # By id and attempt of the first message.
        self.under_way: dict[tuple[int, int], _UnderWay] = {}

    def close(self) -> None:
        with suppress(Exception):
            self.transport.close()
        self.descriptors.forget_all()


class Dispatcher:
    """start() deliveries, step() until each has come back as exactly one Settled."""

    def __init__(self, transports: Mapping[str, MakeTransport], clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = Waiting()
        self._makers = transports
        self._members: dict[str, _Member] = {}
        # Deliveries that failed before their transport took them over.
        self._not_started: list[Settled] = []
        self.in_flight = 0
        self._clock = clock
        self._next_look = clock()

    def wait_also_for(self, descriptor: int) -> None:
        """step() also ends when this can be read, and then was_woken is True."""
        self._waiting.wait_also_for(descriptor)

    @property
    def was_woken(self) -> bool:
        return self._waiting.was_woken

    def parse(self, config: EndpointConfig) -> Endpoint:
        """Raises ConfigError, and no other exception, if the config can't be parsed."""
        try:
            return self._member(config.protocol).transport.parse(config)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"it can't be read: {bulkhead.kind(error)}") from None

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        """Groups messages that are sent together."""
        if endpoint.batch_size > 1:
            # If a message can't be grouped, all are started singly, and only that one fails.
            with suppress(Exception):
                return self._member(endpoint.protocol).transport.group(endpoint, messages)
        return [[message] for message in messages]

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """One delivery: one message, or one group of group()."""
        first = messages[0]
        self.in_flight += 1
        try:
            member = self._member(endpoint.protocol)
            until = self._clock() + endpoint.longest + OVERDUE_SECONDS
            member.under_way[first.id, first.attempt] = _UnderWay(endpoint.id, messages, until)
            member.transport.start(endpoint, messages)
        except Exception as error:
            if (known := self._members.get(endpoint.protocol)) is not None:
                known.under_way.pop((first.id, first.attempt), None)
            self._not_started.append(bulkhead.broken(endpoint.id, messages, error))

    def step(self, max_wait: float) -> list[Settled]:
        """Waits for at most max_wait seconds, and no longer than CHECK_SECONDS. Returns the deliveries that ended."""
        settled, self._not_started = self._not_started, []
        self.in_flight -= len(settled)
        wait = min(max_wait, CHECK_SECONDS)
        for protocol, member in list(self._members.items()):
            try:
                # Also without deliveries in flight: a transport's connections may have heartbeats to send.
                left = member.transport.timeout()
                if left == 0:
                    self._advance(member, settled)
                    left = member.transport.timeout()
                if left is not None and left < wait:
                    wait = left
            except Exception as error:
                self._give_up(protocol, error, settled)
        self._waiting.wait(0 if settled else wait)
        for protocol, member in list(self._members.items()):
            if member.descriptors.ready:
                try:
                    self._advance(member, settled)
                except Exception as error:
                    self._give_up(protocol, error, settled)
        if self.in_flight and (now := self._clock()) >= self._next_look:
            self._next_look = now + OVERDUE_SECONDS / 5
            self._find_lost(now, settled)
        return settled

    def tend(self) -> None:
        """Called while nothing is in flight: kept connections have heartbeats to send, and may have been closed."""
        self.step(0)

    def close(self) -> None:
        for member in self._members.values():
            member.close()
        self._waiting.close()

    def _advance(self, member: _Member, settled: list[Settled]) -> None:
        for each in member.transport.advance(member.descriptors.take_ready()):
            first = each.messages[0]
            # Only the first outcome of a delivery counts.
            if member.under_way.pop((first.id, first.attempt), None) is not None:
                self.in_flight -= 1
                settled.append(each)

    def _give_up(self, protocol: str, error: Exception, settled: list[Settled]) -> None:
        """After an error the state of the transport's deliveries is unknown, so all of them fail. The next delivery
        makes a new transport."""
        member = self._members.pop(protocol)
        self.in_flight -= len(member.under_way)
        settled += [bulkhead.broken(each.endpoint_id, each.messages, error) for each in member.under_way.values()]
        member.close()

    def _find_lost(self, now: float, settled: list[Settled]) -> None:
        """Fails overdue deliveries, so that no message is held forever if its transport loses it."""
        for member in self._members.values():
            for key, each in [known for known in member.under_way.items() if known[1].until <= now]:
                del member.under_way[key]
                self.in_flight -= 1
                settled.append(Settled(each.endpoint_id, each.messages, _LOST))

    def _member(self, protocol: str) -> _Member:
        """Made for the first endpoint of its protocol, so a worker without HTTP endpoints needn't load libcurl."""
        member = self._members.get(protocol)
        if member is None:
            make = self._makers.get(protocol)
            if make is None:
                raise ConfigError(f"no worker delivers protocol {protocol}")
            descriptors = Descriptors(self._waiting)
            member = self._members[protocol] = _Member(descriptors, make(descriptors))
        return member
