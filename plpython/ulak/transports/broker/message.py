"""A message as brokers carry it: a body in bytes, and headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ulak.messages import cloudevents, event
from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import Message, MessageError

MESSAGE_ID = "ulak-message-id"
ATTEMPT = "ulak-attempt"
CREATED_AT = "ulak-created-at"
CORRELATION_ID = "ulak-correlation-id"
CONTENT_TYPE = "content-type"


class Content(NamedTuple):
    body: bytes
    content_type: str
    # The message's own headers without content-type. Only ulak can set headers that begin with ulak-.
    headers: Mapping[str, str]
    # The attributes of a CloudEvent in binary mode; each protocol has its own prefix for their names.
    attributes: Mapping[str, str]


_NOTHING: Mapping[str, str] = {}


def content(message: Message, events: CloudEvents | None = None) -> Content:
    """Raises MessageError."""
    if message.problem is not None:
        raise MessageError(message.problem)
    if message.headers is None and events is None:
        # The hot path: most messages are plain JSON.
        return Content(message.payload.encode(), cloudevents.JSON, _NOTHING, _NOTHING)
    own = event.headers_of(message.headers)
    is_raw = own.pop(":body", None) == "raw"
    # Only http endpoints use these two.
    for name in (":path", ":timeout"):
        own.pop(name, None)
    kind = _pop(own, CONTENT_TYPE)
    if events is None:
        body = cloudevents.raw_body(message) if is_raw else message.payload
        return Content(body.encode(), kind or cloudevents.JSON, own, _NOTHING)
    found = cloudevents.represent(events, message, is_raw, own.get("traceparent"), kind)
    return Content(found.body.encode(), found.content_type, own, found.attributes)


def headers(message: Message, made: Content, prefix: str, of_config: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """Everything that travels beside the body, for protocols whose headers are names and texts. A message's own header
    replaces one of the config, and ulak's headers replace both."""
    found = {
        **of_config,
        **made.headers,
        MESSAGE_ID: message.message_id,
        ATTEMPT: str(message.attempt),
        CONTENT_TYPE: made.content_type,
    }
    if message.created_at is not None:
        found[CREATED_AT] = cloudevents.rfc3339(message.created_at)
    if message.correlation_id is not None:
        found[CORRELATION_ID] = message.correlation_id
    for name, value in made.attributes.items():
        found[prefix + name] = value
    return found


def _pop(own: dict[str, str], name: str) -> str | None:
    """The name in upper or lower case."""
    for each in [given for given in own if given.lower() == name]:
        return own.pop(each)
    return None
