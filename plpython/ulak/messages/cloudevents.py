"""CloudEvents 1.0: a message as a structured event, or its attributes beside the body."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from ulak.messages import event
from ulak.messages.delivery import Message, MessageError

DEFAULT_TYPE = "ulak.message"
JSON = "application/json"
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"

# Characters that the HTTP binding doesn't encode in a header: printable ASCII except space, double quote and percent.
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_OFFSET = re.compile(r"([+-]\d\d)(:?)(\d\d)?$")


class CloudEvents(NamedTuple):
    mode: str
    source: str
    type: str | None = None
    subject: str | None = None


def parse(config: Mapping[str, Any], default_source: str) -> CloudEvents:
    """The keys of a config, whatever the protocol."""
    return CloudEvents(
        mode=config.get("cloudevents_mode", "binary"),
        source=config.get("cloudevents_source", default_source),
        type=config.get("cloudevents_type"),
        subject=config.get("cloudevents_subject"),
    )


def attributes(
    config: CloudEvents, message: Message, traceparent: str | None = None, content_type: str = JSON
) -> dict[str, str]:
    """Context attributes; partitionkey and traceparent are extensions that the specification documents."""
    found = {
        "specversion": "1.0",
        # The event's id, if there is one: a receiver behind two endpoints can see that it got the event twice.
        "id": event.id_of(message) or message.message_id,
        "source": config.source,
        "type": config.type or event.type_of(message) or DEFAULT_TYPE,
        "datacontenttype": content_type,
    }
    if config.subject:
        found["subject"] = config.subject
    if message.created_at:
        found["time"] = rfc3339(message.created_at)
    if message.ordering_key:
        found["partitionkey"] = message.ordering_key
    if message.correlation_id:
        found["correlationid"] = message.correlation_id
    if traceparent:
        found["traceparent"] = traceparent
    return found


def structured(config: CloudEvents, message: Message, traceparent: str | None = None, content_type: str = JSON) -> str:
    """The event as JSON text; the payload is JSON text already, so it is inserted unchanged."""
    found = attributes(config, message, traceparent, content_type)
    head = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return f'{head[:-1]},"data":{message.payload}}}'


class Represented(NamedTuple):
    """A message as an event: body, content type, and the attributes that travel beside it."""

    body: str
    content_type: str
    attributes: Mapping[str, str]


def represent(
    config: CloudEvents, message: Message, is_raw: bool, traceparent: str | None, content_type: str | None
) -> Represented:
    """`content_type` is for a raw body; any other payload is JSON."""
    kind = (is_raw and content_type) or JSON
    body = raw_body(message) if is_raw else message.payload
    if config.mode == "binary":
        # The receiver would take the body for the event, with attributes chosen by the sender.
        if kind.strip().lower().startswith("application/cloudevents"):
            raise MessageError(f"the message's content type is {kind}, and its endpoint makes the event")
        found = attributes(config, message, traceparent)
        del found["datacontenttype"]
        return Represented(body, kind, found)
    if is_raw and is_json(kind):
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise MessageError(f"the message's raw body isn't JSON, and its content type is {kind}") from None
        message = message._replace(payload=body)
    # Other data is a JSON string in the event, and a raw body is stored as one.
    return Represented(structured(config, message, traceparent, kind), STRUCTURED, {})


def raw_body(message: Message) -> str:
    """A raw body is stored as a JSON string, and sent as it was given."""
    raw = json.loads(message.payload)
    if not isinstance(raw, str):
        raise MessageError("the message's raw body isn't a text")
    return raw


def header_value(value: str) -> str:
    """An attribute as the HTTP binding writes it."""
    return quote(value, safe=_PLAIN)


def rfc3339(timestamp: str) -> str:
    """A timestamptz of PostgreSQL in the format of CloudEvents."""
    text = timestamp.replace(" ", "T", 1)
    offset = _OFFSET.search(text, 11)
    if offset is None:
        return text if text.endswith("Z") else text + "Z"
    return f"{text[: offset.start()]}{offset[1]}:{offset[3] or '00'}"


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind in (JSON, "text/json") or kind.endswith("+json")
