"""Delivery into the server's log: each message is one line of JSON. For development, and to see what would be sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ulak.messages import bulkhead, event
from ulak.messages.delivery import (
    DELIVERED,
    ConfigError,
    Endpoint,
    EndpointConfig,
    Message,
    MessageError,
    Outcome,
    Settled,
)
from ulak.safety import text
from ulak.safety.mask import MASK, Mask, is_secret_header
from ulak.transports.transport import Ready

# Limit for each of payload, headers and metadata, unless the config has its own.
MAX_BYTES = 8000
LARGEST_MAX_BYTES = 100_000
# Nothing takes longer than writing a line.
LONGEST = 1.0

_NOT_ASCII = re.compile(r"[^\x20-\x7e]")


class Target(NamedTuple):
    max_bytes: int
    mask: Mask


class LogTransport:
    """Implements transports.transport.Transport; an endpoint's target is a Target."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._settled: list[Settled] = []

    def parse(self, config: EndpointConfig) -> Endpoint:
        max_bytes = config.keys().get("max_bytes", MAX_BYTES)
        if not isinstance(max_bytes, int) or not 0 <= max_bytes <= LARGEST_MAX_BYTES:
            raise ConfigError(f"max_bytes must be from 0 to {LARGEST_MAX_BYTES}")
        return config.parsed(1, LONGEST, Target(max_bytes, Mask(config.secrets)))

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        return [[message] for message in messages]

    def start(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        (message,) = messages
        build = partial(line, endpoint)
        try:
            written = build(message)
        except Exception as error:
            outcome = Outcome(text.line(bulkhead.fault(error, build)))
        else:
            self._log(written)
            outcome = DELIVERED
        self._settled.append(Settled(endpoint.id, messages, outcome))

    def timeout(self) -> float | None:
        return 0.0 if self._settled else None

    def advance(self, ready: Ready) -> list[Settled]:
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        """Nothing is ever in flight."""


def line(endpoint: Endpoint, message: Message) -> str:
    """One line of ASCII, which a log in any encoding can hold. Raises MessageError."""
    if message.problem is not None:
        raise MessageError(message.problem)
    target: Target = endpoint.target
    fields = [
        _field("endpoint", endpoint.name),
        _field("message_id", message.message_id),
        _field("attempt", message.attempt),
    ]
    for name in ("created_at", "correlation_id", "ordering_key"):
        value = getattr(message, name)
        if value is not None:
            fields.append(_field(name, target.mask.hide(text.line(value))))
    fields += _document("headers", _without_secrets(message.headers), target)
    fields += _document("metadata", message.metadata, target)
    fields += _document("payload", message.payload, target)
    return "ulak message: {" + ", ".join(fields) + "}"


def _field(name: str, value: object) -> str:
    return f"{json.dumps(name)}: {json.dumps(value)}"


def _document(name: str, document: str | None, target: Target) -> Iterator[str]:
    """JSON text unchanged, or its beginning as a string if it is longer than max_bytes."""
    if document is None:
        return
    most = target.max_bytes
    kept = _ascii(document[: most + 1])
    if len(kept) <= most:
        yield f"{json.dumps(name)}: {target.mask.hide(kept)}"
    else:
        yield _field(f"{name}_length", len(document))
        if most:
            yield _field(f"{name}_start", target.mask.hide(kept[:most], is_cut=True))


def _ascii(document: str) -> str:
    """The same JSON: only strings can contain anything but ASCII."""
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], document)


def _without_secrets(headers: str | None) -> str | None:
    if headers is None:
        return None
    try:
        given = event.headers_of(headers)
    except MessageError:
        return json.dumps(MASK)
    return json.dumps({name: MASK if is_secret_header(name.lower()) else value for name, value in given.items()})
