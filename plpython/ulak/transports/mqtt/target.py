"""The config of an mqtt endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.transports.broker import target as broker
from ulak.transports.broker.target import Defaults

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


class Target(broker.Target):
    batch_size = BATCH_SIZE

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        given = self.given
        self.address = self.address_of("broker", PORT, TLS_PORT, not given.get("tls_insecure", False))
        self.topic = self.route("topic", topic_problem)
        self.qos = self.number("qos", 1, 0, 2)
        self.retain = bool(given.get("retain", False))
        self.client_id: str | None = given.get("client_id")
        self.username: str | None = given.get("username")
        self.password: str | None = given.get("password")
        self.clean_session = bool(given.get("clean_session", True))
        self.will = _will(given)


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
