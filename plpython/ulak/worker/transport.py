"""The seam between the worker and the ways to deliver: all that it knows of a transport.

A transport is made by ulak/transports/registry.py, the one place that knows them all. It never waits: it registers its
descriptors with the Descriptors that it was made with (worker/epoll.py), says by timeout() how long it can be left
alone, and is advanced when a descriptor is ready or that time is over. tests/unit/test_transport_contract.py holds
every transport to this.

Any error that one of its methods raises, except a cancel, ends the transport and fails all that it has under way
(worker/dispatcher.py). So a transport handles errors of one message, one exchange or one connection itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ulak.messages.delivery import Endpoint, EndpointConfig, Message, Settled

Ready = Sequence[tuple[int, int]]


class Transport(Protocol):
    def parse(self, config: EndpointConfig) -> Endpoint:
        """Raises ConfigError; of any other error only the type is told."""

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        """Which of these travel together, in their order: at most endpoint.batch_size in one delivery."""

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """Begins one delivery. A message that nothing can be built of is an outcome of its own (bulkhead.fault())."""

    def timeout(self) -> float | None:
        """Seconds after which it wants to be advanced whatever is ready: 0 at once; None: there is no such time."""

    def advance(self, ready: Ready) -> list[Settled]:
        """Goes on, with the descriptors that are ready and their events. Each delivery ends in exactly one Settled."""

    def close(self) -> None:
        """Drops what is under way."""
