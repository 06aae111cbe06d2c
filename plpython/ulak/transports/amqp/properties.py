"""A message's AMQP properties and headers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pika import spec

from ulak.messages import event
from ulak.messages.delivery import Message
from ulak.transports.amqp.frames import LONGEST_SHORT
from ulak.transports.amqp.target import Target
from ulak.transports.broker import message as messages
from ulak.transports.broker.message import Content

ORDERING_KEY = "ulak-ordering-key"
# As the binding of CloudEvents to AMQP names attributes.
CLOUDEVENTS = "cloudEvents:"


def properties(target: Target, message: Message, made: Content) -> Any:
    headers: dict[str, Any] = {messages.ATTEMPT: message.attempt}
    if message.ordering_key is not None:
        headers[ORDERING_KEY] = message.ordering_key
    for name, value in made.headers.items():
        headers.setdefault(name, value)
    for name, value in made.attributes.items():
        headers[CLOUDEVENTS + name] = value
    return spec.BasicProperties(
        content_type=made.content_type,
        delivery_mode=spec.PERSISTENT_DELIVERY_MODE if target.persistent else spec.TRANSIENT_DELIVERY_MODE,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        timestamp=_seconds(message.created_at),
        type=_type(message),
        headers=headers,
        app_id="ulak",
    )


def _type(message: Message) -> str | None:
    """A longer one doesn't fit into the property; an event has it in its headers anyway."""
    found = event.type_of(message) if message.metadata is not None else None
    return found if found is not None and len(found.encode()) <= LONGEST_SHORT else None


def _seconds(created_at: str | None) -> int | None:
    """A timestamp of PostgreSQL in whole seconds since 1970, as AMQP wants it."""
    if created_at is None:
        return None
    try:
        seconds = int(datetime.fromisoformat(created_at).timestamp())
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 else None
