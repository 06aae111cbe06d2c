"""The config of a kafka endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety import files
from ulak.safety.mask import Mask
from ulak.transports.broker import target as broker
from ulak.transports.broker.route import Route
from ulak.transports.broker.target import Defaults

# Seconds, unless the config says otherwise.
MESSAGE_TIMEOUT = 10.0
# librdkafka checks for timed-out messages once a second, and for requests in flight a moment later.
LATEST_REPORT = 3.0

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_BROKER = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")
_FILES = {
    "ssl.ca.location": files.CERTIFICATE,
    "ssl.certificate.location": files.CERTIFICATE,
    "ssl.key.location": files.PRIVATE_KEY,
}
_SECRETS = ("sasl.password", "ssl.key.password", "ssl.key.pem")
# Not configurable: delivered means that every replica in sync has the message, once.
_FIXED: Mapping[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    # Its events report errors; its log would end up in the server's.
    "log_level": 0,
}
_DEFAULTS: Mapping[str, Any] = {
    "client.id": "ulak",
    # Don't linger for more messages: a delivery brings many at once.
    "linger.ms": 0,
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,
    # A new topic isn't known to all brokers at once; one that is missing for longer is an error.
    "topic.metadata.propagation.max.ms": 3000,
}
# Aliases that a config may use.
_ALIASES = {
    "delivery.timeout.ms": "message.timeout.ms",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
}


class Target(broker.Target):
    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        given = self.given
        options = {_ALIASES.get(name, name): value for name, value in given.get("options", {}).items()}
        message_timeout = _seconds(options, "message.timeout.ms", MESSAGE_TIMEOUT)
        self.connect_timeout = _seconds(options, "socket.connection.setup.timeout.ms", broker.CONNECT_TIMEOUT)
        self.timeout = self.connect_timeout + message_timeout + LATEST_REPORT
        self.brokers = tuple(map(_broker, self.listed("broker")))
        # For errors.
        self.peer = ",".join(f"{host}:{port}" for host, port in self.brokers[:3])
        self.topic = self.route("topic", _topic_problem)
        self.key = Route("key", given["key"], lambda key: None) if "key" in given else None
        # -1: librdkafka's partitioner decides, by the key.
        self.partition: int = given.get("partition", -1)
        # The config's headers, for every message.
        self.headers: Mapping[str, str] = given.get("headers", {})
        # By librdkafka's names.
        self.properties: Mapping[str, Any] = {
            **_DEFAULTS,
            # Reconnect soon to a broker that is back.
            "reconnect.backoff.max.ms": max(1000, _number(options, "reconnect.backoff.ms", 0)),
            **options,
            **_FIXED,
            "message.timeout.ms": round(message_timeout * 1000),
            "socket.connection.setup.timeout.ms": round(self.connect_timeout * 1000),
        }
        self.has_tls = str(self.properties.get("security.protocol", "")).lower() in ("ssl", "sasl_ssl")
        # The properties that name files, and what each file must contain.
        self.files = [(str(self.properties[name]), kind) for name, kind in _FILES.items() if name in self.properties]
        self.mask = Mask([*_private(config, options, self.brokers), *(path for path, _ in self.files)])


def _broker(text: str) -> tuple[str, int]:
    found = _BROKER.fullmatch(text.strip())
    if found is None:
        raise ConfigError("broker must be host:port, or several of them with commas between")
    return found[1] or found[2], int(found[3])


def _private(config: EndpointConfig, options: Mapping[str, Any], brokers: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Values that errors must not contain: secrets, and paths of files."""
    yield from config.secrets
    for name in _SECRETS:
        if name in options:
            yield str(options[name])
    # If a whole list is a secret, each host is one, too: errors name hosts.
    for host, port in brokers:
        if any(f"{host}:{port}" in secret for secret in config.secrets):
            yield f"{host}:{port}"
            yield host


def _topic_problem(topic: str) -> str | None:
    if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        return "must have 1 to 249 characters, of letters, digits, dot, underscore and hyphen"
    return None


def _seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    return _number(options, name, round(default * 1000)) / 1000


def _number(options: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(options.get(name, default))
    except ValueError:
        raise ConfigError(f"options: {name} isn't a number") from None
