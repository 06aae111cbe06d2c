"""The config of a kafka endpoint, made into what its producer and its messages need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety import files
from ulak.safety.mask import Mask
from ulak.transports.broker import config as keys
from ulak.transports.broker.route import Route

# Messages of one delivery.
BATCH_SIZE = 100
# Seconds, if the config doesn't say.
MESSAGE_TIMEOUT = 10.0
# librdkafka looks once a second whose time is over, and a moment later at requests that are under way.
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
    # Errors come by a callback; its log would go to the server's.
    "log_level": 0,
}
_DEFAULTS: Mapping[str, Any] = {
    "client.id": "ulak",
    # Don't linger for more messages: a delivery brings many at once.
    "linger.ms": 0,
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,
    # A topic that was just made isn't known everywhere at once; what is missing for longer is told in time.
    "topic.metadata.propagation.max.ms": 3000,
}
# Other names of the same setting, by which a config may have it.
_ALIASES = {
    "delivery.timeout.ms": "message.timeout.ms",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
}


class Target(NamedTuple):
    brokers: tuple[tuple[str, int], ...]
    topic: Route
    key: Route | None
    # -1: librdkafka's partitioner decides, by the key.
    partition: int
    # The config's headers, for every message.
    headers: Mapping[str, str]
    events: CloudEvents | None
    # By librdkafka's names.
    properties: Mapping[str, Any]
    # The properties that name files, and what each file must contain.
    files: tuple[tuple[str, bytes], ...]
    mask: Mask
    connect_timeout: float
    # Seconds for a delivery, including connecting.
    timeout: float
    batch_size: int = BATCH_SIZE

    @property
    def peer(self) -> str:
        """For errors."""
        return ",".join(f"{host}:{port}" for host, port in self.brokers[:3])

    @property
    def has_tls(self) -> bool:
        return str(self.properties.get("security.protocol", "")).lower() in ("ssl", "sasl_ssl")


def parse(config: EndpointConfig, cloudevents_source: str) -> Target:
    """Raises ConfigError; the database has checked the config already, but not with this code."""
    given = config.keys()
    options = {_ALIASES.get(name, name): value for name, value in given.get("options", {}).items()}
    brokers = tuple(_brokers(given.get("broker")))
    message_timeout = _seconds(options, "message.timeout.ms", MESSAGE_TIMEOUT)
    connect_timeout = _seconds(options, "socket.connection.setup.timeout.ms", keys.CONNECT_TIMEOUT)
    properties = {
        **_DEFAULTS,
        **options,
        **_FIXED,
        # A broker that is back is found soon.
        "reconnect.backoff.max.ms": options.get(
            "reconnect.backoff.max.ms", max(1000, _number(options, "reconnect.backoff.ms", 0))
        ),
        "message.timeout.ms": round(message_timeout * 1000),
        "socket.connection.setup.timeout.ms": round(connect_timeout * 1000),
    }
    named = tuple((str(properties[name]), content) for name, content in _FILES.items() if name in properties)
    return Target(
        brokers=brokers,
        topic=Route("topic", str(given.get("topic", "")), _topic_problem, bool(given.get("allow_separators"))),
        key=Route("key", given["key"], lambda key: None) if "key" in given else None,
        partition=given.get("partition", -1),
        headers=given.get("headers", {}),
        events=keys.events(given, cloudevents_source),
        properties=properties,
        files=named,
        mask=Mask([*_private(config, options, brokers), *(path for path, _ in named)]),
        connect_timeout=connect_timeout,
        timeout=connect_timeout + message_timeout + LATEST_REPORT,
    )


def _brokers(given: Any) -> Iterator[tuple[str, int]]:
    listed = ",".join(map(str, given)) if isinstance(given, list) else str(given or "")
    for each in listed.split(","):
        found = _BROKER.fullmatch(each.strip())
        if found is None:
            raise ConfigError("broker must be host:port, or several of them with commas between")
        yield found[1] or found[2], int(found[3])


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
