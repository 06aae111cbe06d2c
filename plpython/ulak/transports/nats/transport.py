"""Delivery over connections to servers of NATS."""

from __future__ import annotations

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.transports.broker.connection import Connection, Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.nats import target
from ulak.transports.nats.connection import NatsConnection
from ulak.transports.nats.target import Target


class NatsTransport(BrokerTransport):
    def target(self, config: EndpointConfig) -> Target:
        return target.parse(config, self.defaults.timeout, self.defaults.cloudevents_source)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Connection:
        return NatsConnection(endpoint, self.defaults.version, surroundings)
