"""The config of an amqp endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.amqp.frames import LONGEST_SHORT
from ulak.transports.broker import target as broker
from ulak.transports.broker.target import Defaults

# Messages in one delivery: they are written together, and the broker confirms many at once. With RabbitMQ 3.10 the
# transport needs 23 us of processor time per message for deliveries of 1, 9 for 10, 8 for 20 and 7 for 100. Larger ones
# would only make more messages wait for a slow broker.
BATCH_SIZE = 20
PORT = 5672
TLS_PORT = 5671
HEARTBEAT = 60
FRAME_MAX = 131_072
LEAST_FRAME_MAX = 4096


class Target(broker.Target):
    batch_size = BATCH_SIZE

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        given = self.given
        self.address = self.address_of("host", PORT, TLS_PORT, bool(given.get("tls_verify_peer", True)))
        self.connect_timeout = self.timeout
        self.vhost = _short(given, "vhost", "/")
        self.username = given.get("username", "guest")
        self.password = given.get("password", "guest")
        if self.password == "guest":
            # RabbitMQ's default password isn't a secret, and appears in ordinary words.
            self.mask = Mask(config.secrets)
        self.exchange = _short(given, "exchange", "")
        # If given, the exchange is declared with this type, durable, before the first message. None: it must exist.
        self.exchange_type: str | None = given.get("exchange_type")
        if not self.exchange and not given.get("routing_key"):
            raise ConfigError("routing_key is required without an exchange: it is the name of the queue then")
        self.routing_key = self.route("routing_key", _key_problem)
        self.persistent = bool(given.get("persistent", True))
        # True: a message that no queue takes has failed.
        self.mandatory = bool(given.get("mandatory", True))
        # Seconds; 0: none.
        self.heartbeat = self.number("heartbeat", HEARTBEAT, 0, 3600)
        self.frame_max = self.number("frame_max", FRAME_MAX, LEAST_FRAME_MAX, 2_147_483_647)


def _short(config: Mapping[str, Any], name: str, default: str) -> str:
    value = config.get(name, default)
    if not isinstance(value, str) or len(value.encode()) > LONGEST_SHORT:
        raise ConfigError(f"{name} must be a text of at most {LONGEST_SHORT} bytes")
    return value


def _key_problem(key: str) -> str | None:
    return f"is longer than {LONGEST_SHORT} bytes" if len(key.encode()) > LONGEST_SHORT else None
