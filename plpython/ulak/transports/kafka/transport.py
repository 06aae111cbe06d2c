"""Delivery to Kafka: one producer for each endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.safety.address import Guard
from ulak.transports.broker.link import Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.kafka import target
from ulak.transports.kafka.connection import KafkaConnection
from ulak.worker.waiting import Descriptors


class KafkaTransport(BrokerTransport):
    def __init__(
        self,
        descriptors: Descriptors,
        guard: Guard,
        cloudevents_source: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(descriptors, guard, clock)
        self._cloudevents_source = cloudevents_source

    @property
    def most_connections(self) -> int:
        """A producer has a thread for each broker of its cluster, and two more."""
        return 20

    def target(self, config: EndpointConfig) -> target.Target:
        return target.parse(config, self._cloudevents_source)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> KafkaConnection:
        return KafkaConnection(endpoint, surroundings)
