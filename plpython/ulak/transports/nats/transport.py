"""Delivery over connections to servers of NATS."""

from __future__ import annotations

import time
from collections.abc import Callable

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.safety.address import Guard
from ulak.transports.broker.connection import Connection, Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.nats import target
from ulak.transports.nats.connection import NatsConnection
from ulak.transports.nats.target import Target
from ulak.worker.waiting import Descriptors


class NatsTransport(BrokerTransport):
    def __init__(
        self,
        descriptors: Descriptors,
        guard: Guard,
        version: str,
        timeout: float,
        source: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout` and the `source` of CloudEvents are for endpoints that name none."""
        super().__init__(descriptors, guard, clock)
        self._version = version
        self._timeout = timeout
        self._source = source

    def target(self, config: EndpointConfig) -> Target:
        return target.parse(config, self._timeout, self._source)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Connection:
        return NatsConnection(endpoint, self._version, surroundings)
