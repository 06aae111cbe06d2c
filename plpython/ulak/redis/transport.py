"""Delivery over connections to servers of Redis."""

from __future__ import annotations

from ulak.broker.connection import Connection, Surroundings
from ulak.broker.transport import BrokerTransport
from ulak.delivery import Endpoint, EndpointConfig
from ulak.redis import target
from ulak.redis.connection import RedisConnection
from ulak.redis.target import Target


class RedisTransport(BrokerTransport):
    def target(self, config: EndpointConfig) -> Target:
        return target.parse(config)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Connection:
        return RedisConnection(endpoint, surroundings)
