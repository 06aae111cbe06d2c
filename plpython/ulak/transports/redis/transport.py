"""Delivery over connections to servers of Redis."""

from __future__ import annotations

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.transports.broker.connection import Connection, Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.redis import target
from ulak.transports.redis.connection import RedisConnection
from ulak.transports.redis.target import Target


class RedisTransport(BrokerTransport):
    def target(self, config: EndpointConfig) -> Target:
        return target.parse(config)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Connection:
        return RedisConnection(endpoint, surroundings)
