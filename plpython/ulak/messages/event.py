"""The event that a message carries: its id, headers and metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ulak.messages.delivery import Message, MessageError

# As the database writes it; inside a value the quotes would be escaped.
_ID = re.compile(r'"ulak-event-id": "([0-9a-f-]{36})"')

_TRACE = ("traceparent", "tracestate")


def id_of(message: Message) -> str | None:
    """The id of the published event, which is the same for all subscribers."""
    found = _ID.search(message.headers) if message.headers else None
    return found[1] if found else None


def shared_headers(message: Message) -> str | None:
    """The headers that messages in one request can share: not the event id nor the trace, which each has for itself."""
    headers = message.headers
    if not headers:
        return headers
    # A comma always follows: "ulak-event-type" is there, too, and jsonb writes shorter keys first.
    headers = re.sub(_ID.pattern + ", ", "", headers, count=1)
    return _untraced(headers) if '"traceparent"' in headers else headers


def _untraced(headers: str) -> str | None:
    try:
        others = {name: value for name, value in headers_of(headers).items() if name not in _TRACE}
    except MessageError:
        return headers
    return json.dumps(others) if others else None


def headers_of(text: str | None) -> dict[str, str]:
    """A message's headers, including options of its request, whose names begin with a colon. Raises MessageError."""
    if text is None:
        return {}
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise MessageError("the message's headers aren't a JSON object of names and texts")
    return given


def metadata_of(message: Message) -> dict[str, Any]:
    if not message.metadata:
        return {}
    try:
        metadata = json.loads(message.metadata)
    except RecursionError:
        raise MessageError("the message's metadata is nested too deeply to be read") from None
    return metadata if isinstance(metadata, dict) else {}


def type_of(message: Message) -> str | None:
    found = metadata_of(message).get("event_type")
    return found if isinstance(found, str) and found else None


def patterns(event_type: str) -> Iterator[str]:
    """The patterns that match it, the most specific first, like ulak_private.patterns_of()."""
    yield event_type
    parts = event_type.split(".")
    for length in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:length]) + ".*"
    if not event_type.startswith("ulak."):
        yield "*"
