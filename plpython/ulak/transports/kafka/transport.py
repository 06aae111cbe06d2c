"""Delivery to Kafka: one producer for each endpoint."""

from __future__ import annotations

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.transports.broker.link import Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.kafka import target
from ulak.transports.kafka.connection import KafkaConnection


class KafkaTransport(BrokerTransport):
    @property
    def most_connections(self) -> int:
        """A producer has a thread for each broker of its cluster, and two more."""
        return 20

    def target(self, config: EndpointConfig) -> target.Target:
        return target.parse(config, self.defaults.cloudevents_source)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> KafkaConnection:
        return KafkaConnection(endpoint, surroundings)
