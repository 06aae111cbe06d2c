"""An amqp endpoint's config, checked once and kept as what a connection needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.amqp.frames import LONGEST_SHORT
from ulak.transports.broker import config as keys
from ulak.transports.broker.connection import Address
from ulak.transports.broker.route import Route

PORT = 5672
TLS_PORT = 5671
HEARTBEAT = 60
FRAME_MAX = 131_072
LEAST_FRAME_MAX = 4096


class Target(NamedTuple):
    address: Address
    vhost: str
    username: str
    password: str
    exchange: str
    # The exchange is declared with it, durable, before the first message; None: it has to be there.
    exchange_type: str | None
    routing_key: Route
    persistent: bool
    # A message that no queue takes has failed.
    mandatory: bool
    # Seconds; 0: none.
    heartbeat: int
    frame_max: int
    timeout: float
    batch_size: int
    cloudevents: CloudEvents | None
    mask: Mask


def parse(given: EndpointConfig, timeout: float, cloudevents_source: str, batch_size: int) -> Target:
    """Raises ConfigError."""
    config = given.keys()
    host = keys.host(config, "host")
    username, password = config.get("username", "guest"), config.get("password", "guest")
    exchange = config.get("exchange", "")
    for name, value in (("exchange", exchange), ("vhost", config.get("vhost", "/"))):
        if not isinstance(value, str) or len(value.encode()) > LONGEST_SHORT:
            raise ConfigError(f"{name} must be a text of at most {LONGEST_SHORT} bytes")
    key = config.get("routing_key", "")
    if not exchange and not key:
        raise ConfigError("routing_key is required without an exchange: it is the name of the queue then")
    context = keys.tls_context(config, bool(config.get("tls_verify_peer", True)))
    return Target(
        address=Address(host, _integer(config, "port", PORT if context is None else TLS_PORT, 1, 65535), context),
        vhost=config.get("vhost", "/"),
        username=username,
        password=password,
        exchange=exchange,
        exchange_type=config.get("exchange_type"),
        routing_key=Route("routing_key", key, _key_problem, bool(config.get("allow_separators"))),
        persistent=bool(config.get("persistent", True)),
        mandatory=bool(config.get("mandatory", True)),
        heartbeat=_integer(config, "heartbeat", HEARTBEAT, 0, 3600),
        frame_max=_integer(config, "frame_max", FRAME_MAX, LEAST_FRAME_MAX, 2_147_483_647),
        timeout=float(config.get("timeout", timeout)),
        batch_size=batch_size,
        cloudevents=keys.events(config, cloudevents_source),
        # RabbitMQ's own default isn't a secret, and is part of ordinary words.
        mask=keys.mask(given, None if password == "guest" else password),
    )


def _integer(config: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be from {least} to {most}")
    return value


def _key_problem(key: str) -> str | None:
    return f"is longer than {LONGEST_SHORT} bytes" if len(key.encode()) > LONGEST_SHORT else None
