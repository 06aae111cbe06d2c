"""Delivery over connections to brokers of MQTT."""

from __future__ import annotations

from ulak.messages.delivery import Endpoint, EndpointConfig
from ulak.transports.broker.connection import Connection, Surroundings
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.mqtt import target
from ulak.transports.mqtt.connection import MqttConnection
from ulak.transports.mqtt.target import Target


class MqttTransport(BrokerTransport):
    def target(self, config: EndpointConfig) -> Target:
        return target.parse(config, self.defaults.timeout, self.defaults.cloudevents_source)

    def connect(self, endpoint: Endpoint, surroundings: Surroundings) -> Connection:
        return MqttConnection(endpoint, surroundings)
