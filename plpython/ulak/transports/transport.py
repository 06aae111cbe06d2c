"""The worker's interface to transports: all that it knows of them.

A transport is made by ulak/transports/registry.py, the one place that knows them all. It never waits: it registers its
descriptors with the Descriptors that it was made with, returns from timeout() how long it can be left alone, and is
advanced when a descriptor is ready or that time is over. tests/unit/test_transport_contract.py checks this for every
transport.

An error raised by advance() or timeout(), except a cancel, ends the transport and fails all of its deliveries under way
(transports/dispatcher.py). So a transport handles errors of one message, one exchange or one connection itself.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ulak.messages.delivery import Endpoint, EndpointConfig, Message, Settled

Ready = Sequence[tuple[int, int]]

READABLE: int = select.EPOLLIN
WRITABLE: int = select.EPOLLOUT


class Transport(Protocol):
    def parse(self, config: EndpointConfig) -> Endpoint:
        """Raises ConfigError; any other error is reported by its type alone."""

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        """Groups messages into deliveries, in their order: at most endpoint.batch_size in one delivery."""

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """Begins one delivery. A message that no request can be built from gets its own outcome (bulkhead.fault())."""

    def timeout(self) -> float | None:
        """Seconds after which it wants to be advanced even if nothing is ready; 0: at once; None: no such time."""

    def advance(self, ready: Ready) -> list[Settled]:
        """Takes the ready descriptors with their events. Each delivery ends in exactly one Settled."""

    def close(self) -> None:
        """Drops all deliveries under way."""


class Descriptors:
    """The descriptors of one transport. Their epoll is itself a descriptor, and the worker waits for those of all
    transports at once."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, descriptor: int, events: int) -> None:
        try:
            self._epoll.modify(descriptor, events)
        except FileNotFoundError:
            self._epoll.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        # If it has been closed since, the kernel has removed it already.
        with suppress(OSError):
            self._epoll.unregister(descriptor)

    def ready(self) -> Ready:
        return self._epoll.poll(0)

    def close(self) -> None:
        self._epoll.close()
