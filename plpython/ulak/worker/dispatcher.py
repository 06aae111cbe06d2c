"""Hands each delivery to the transport of its endpoint, and waits for all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ulak.delivery import ConfigError, Endpoint, EndpointConfig, Message, Settled
from ulak.worker.transport import Transport
from ulak.worker.tuning import LONGEST_WAIT
from ulak.worker.waiting import Descriptors, Waiting

MakeTransport = Callable[[Descriptors], Transport]


class _Member:
    __slots__ = ("descriptors", "transport")

    def __init__(self, descriptors: Descriptors, transport: Transport) -> None:
        self.descriptors = descriptors
        self.transport = transport


class Dispatcher:
    """start() deliveries, step() until each has come back as exactly one Settled."""

    def __init__(self, transports: Mapping[str, MakeTransport]) -> None:
        self._waiting = Waiting()
        self._makers = transports
        self._members: dict[str, _Member] = {}
        self.in_flight = 0

    def wait_also_for(self, descriptor: int) -> None:
        """step() also ends when this can be read; was_woken tells."""
        self._waiting.wait_also_for(descriptor)

    @property
    def was_woken(self) -> bool:
        return self._waiting.was_woken

    def parse(self, config: EndpointConfig) -> Endpoint:
        """Raises ConfigError, or whatever a config does to our code."""
        return self._member(config.protocol).transport.parse(config)

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        """Which of these travel together."""
        if endpoint.batch_size <= 1:
            return [[message] for message in messages]
        return self._members[endpoint.protocol].transport.group(endpoint, messages)

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """One delivery: one message, or one group of group()."""
        self.in_flight += 1
        self._members[endpoint.protocol].transport.start(endpoint, messages)

    def step(self, max_wait: float) -> list[Settled]:
        """Deliveries that ended, after at most max_wait seconds, or 0.1."""
        settled: list[Settled] = []
        wait = min(max_wait, LONGEST_WAIT)
        for member in self._members.values():
            # Also of one with nothing in flight: a connection that is kept may have a heartbeat to send.
            left = member.transport.timeout()
            if left == 0:
                self._advance(member, settled)
                left = member.transport.timeout()
            if left is not None and left < wait:
                wait = left
        self._waiting.wait(0 if settled else wait)
        for member in self._members.values():
            if member.descriptors.ready:
                self._advance(member, settled)
        return settled

    def tend(self) -> None:
        """While nothing is in flight: connections that are kept have heartbeats to send, and may have been closed."""
        self.step(0)

    def close(self) -> None:
        for member in self._members.values():
            member.transport.close()
        self._waiting.close()

    def _advance(self, member: _Member, settled: list[Settled]) -> None:
        ended = member.transport.advance(member.descriptors.take_ready())
        if ended:
            self.in_flight -= len(ended)
            settled += ended

    def _member(self, protocol: str) -> _Member:
        """Made with the first endpoint of its protocol: who has none over HTTP needn't load libcurl."""
        member = self._members.get(protocol)
        if member is None:
            make = self._makers.get(protocol)
            if make is None:
                raise ConfigError(f"no worker delivers protocol {protocol}")
            descriptors = Descriptors(self._waiting)
            member = self._members[protocol] = _Member(descriptors, make(descriptors))
        return member
