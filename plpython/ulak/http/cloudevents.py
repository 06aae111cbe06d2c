"""CloudEvents 1.0: a message as a structured event, or its attributes as ce- headers."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from ulak.http import header
from ulak.http.model import CloudEvents, Message, MessageError

DEFAULT_TYPE = "ulak.message"
JSON = "application/json"
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"

# What the HTTP binding leaves as it is in a header: printable ASCII but space, double quote and percent.
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_OFFSET = re.compile(r"([+-]\d\d)(:?)(\d\d)?$")


def attributes(
    config: CloudEvents, message: Message, traceparent: str | None = None, content_type: str = JSON
) -> dict[str, str]:
    """Context attributes; partitionkey and traceparent are extensions that the specification documents."""
    found = {
        "specversion": "1.0",
        # That of the event, if it is one: a receiver behind two endpoints gets it twice and can tell.
        "id": header.event_id(message.headers) or message.message_id,
        "source": config.source,
        "type": config.type or _event_type(message) or DEFAULT_TYPE,
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
    """The event as JSON text; the payload is JSON text already and goes in as it is."""
    found = attributes(config, message, traceparent, content_type)
    head = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return f'{head[:-1]},"data":{message.payload}}}'


def binary_headers(config: CloudEvents, message: Message, traceparent: str | None = None) -> dict[str, str]:
    """ce- headers; datacontenttype travels as content-type, the payload as the body."""
    found = attributes(config, message, traceparent)
    del found["datacontenttype"]
    return {f"ce-{name}": quote(value, safe=_PLAIN) for name, value in found.items()}


def problem(config: CloudEvents, message: Message) -> str | None:
    """Why no event can be made of this message, or None."""
    if message.metadata and not config.type:
        try:
            _event_type(message)
        except MessageError as error:
            return str(error)
    return None


def rfc3339(timestamp: str) -> str:
    """PostgreSQL's text of a timestamptz in the form that CloudEvents asks for."""
    text = timestamp.replace(" ", "T", 1)
    offset = _OFFSET.search(text, 11)
    if offset is None:
        return text if text.endswith("Z") else text + "Z"
    return f"{text[: offset.start()]}{offset[1]}:{offset[3] or '00'}"


def _event_type(message: Message) -> str | None:
    if not message.metadata:
        return None
    try:
        metadata = json.loads(message.metadata)
    except RecursionError:
        raise MessageError("the message's metadata is nested too deeply to be read") from None
    found = metadata.get("event_type") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) and found else None


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind in (JSON, "text/json") or kind.endswith("+json")
