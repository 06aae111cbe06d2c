"""An endpoint's config of protocol mqtt, made into what its connection works with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.broker import config as keys
from ulak.transports.broker.connection import Address
from ulak.transports.broker.route import Route

PORT = 1883
TLS_PORT = 8883
# Messages in one delivery (make bench ARGS=brokers). More of them than the broker takes at once wait in the client.
BATCH_SIZE = 50
# Bytes of a topic, or of a name or value of a property: the protocol writes lengths in two bytes.
LONGEST_TEXT = 65535


class Will(NamedTuple):
    topic: str
    payload: bytes
    qos: int
    retain: bool


class Target(NamedTuple):
    address: Address
    mask: Mask
    topic: Route
    qos: int
    retain: bool
    client_id: str | None
    username: str | None
    password: str | None
    clean_session: bool
    will: Will | None
    events: CloudEvents | None
    connect_timeout: float
    timeout: float
    batch_size: int = BATCH_SIZE


def parse(config: EndpointConfig, default_timeout: float, default_source: str) -> Target:
    """Raises ConfigError; the database has checked the config already, but not with this code."""
    given = config.keys()
    timeout = float(given.get("timeout", default_timeout))
    context = keys.tls_context(given, not given.get("tls_insecure", False))
    port = int(given.get("port", PORT if context is None else TLS_PORT))
    qos = int(given.get("qos", 1))
    if qos not in (0, 1, 2):
        raise ConfigError("qos must be 0, 1 or 2")
    return Target(
        address=Address(keys.host(given, "broker"), port, context),
        mask=keys.mask(config, given.get("password")),
        topic=Route("topic", str(given.get("topic", "")), topic_problem, bool(given.get("allow_separators"))),
        qos=qos,
        retain=bool(given.get("retain", False)),
        client_id=given.get("client_id"),
        username=given.get("username"),
        password=given.get("password"),
        clean_session=bool(given.get("clean_session", True)),
        will=_will(given),
        events=keys.events(given, default_source),
        connect_timeout=min(timeout, keys.CONNECT_TIMEOUT),
        timeout=timeout,
    )


# Brokers close the connection at a text with one of these, with everything that is under way over it.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def text_problem(text: str) -> str | None:
    if text.isascii() and text.isprintable() and len(text) <= LONGEST_TEXT:
        return None
    if _FORBIDDEN.search(text) or any(ord(character) & 0xFFFE == 0xFFFE for character in text):
        return "has a character that a text of MQTT can't have"
    return None if len(text.encode()) <= LONGEST_TEXT else "is too long for MQTT"


def topic_problem(topic: str) -> str | None:
    if not topic:
        return "must not be empty"
    if wrong := text_problem(topic):
        return wrong
    if "+" in topic or "#" in topic:
        return "must not have a wildcard (+ or #)"
    return None


def _will(given: Mapping[str, Any]) -> Will | None:
    topic = given.get("will_topic")
    if topic is None:
        return None
    if wrong := topic_problem(str(topic)):
        raise ConfigError(f"will_topic {wrong}")
    payload = str(given.get("will_payload", "")).encode()
    return Will(str(topic), payload, int(given.get("will_qos", 0)), bool(given.get("will_retain", False)))
