"""The config of an amqp endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.amqp.frames import LONGEST_SHORT
from ulak.transports.broker import target as broker
from ulak.transports.broker.target import Defaults

# Messages of one delivery: they are written together, and the broker confirms many at once. To RabbitMQ 3.10, in
# processor time of the transport's: 23 us a message with 1, 9 with 10, 8 with 20, 7 with 100. More would only let more
# wait for a broker that is slow.
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
            # RabbitMQ's own default isn't a secret, and is part of ordinary words.
            self.mask = Mask(config.secrets)
        self.exchange = _short(given, "exchange", "")
        # The exchange is declared with it, durable, before the first message; None: it has to be there.
        self.exchange_type: str | None = given.get("exchange_type")
        if not self.exchange and not given.get("routing_key"):
            raise ConfigError("routing_key is required without an exchange: it is the name of the queue then")
        self.routing_key = self.route("routing_key", _key_problem)
        self.persistent = bool(given.get("persistent", True))
        # A message that no queue takes has failed.
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
