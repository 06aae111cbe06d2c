"""Several messages of one endpoint in one request: a JSON array, or a CloudEvents batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from ulak import cloudevents, header
from ulak.model import Endpoint, Message

# A fixed namespace makes a batch's id a function of its messages' ids.
_NAMESPACE = uuid.UUID("6f1a8c1e-6a3d-5c0b-9c3f-0b7a5b8f2d11")
# Receivers commonly refuse bodies above a few megabytes.
MAX_BODY = 4 * 1024 * 1024


def group(endpoint: Endpoint, messages: Iterable[Message], max_body: int = MAX_BODY) -> list[list[Message]]:
    """Requests to make of these messages, in order; messages with different headers don't share one."""
    if endpoint.batch_size <= 1:
        return [[message] for message in messages]
    groups: list[list[Message]] = []
    size = 0
    for message in messages:
        if endpoint.cloudevents is not None and (problem := cloudevents.problem(endpoint.cloudevents, message)):
            # A request of its own, which fails alone.
            message = message._replace(problem=problem)
        length = len(message.payload)
        last = groups[-1] if groups else None
        if (
            last is not None
            and len(last) < endpoint.batch_size
            and header.without_event_id(last[0].headers) == header.without_event_id(message.headers)
            and last[0].problem is None
            and message.problem is None
            and size + length <= max_body
        ):
            last.append(message)
            size += length
        else:
            groups.append([message])
            size = length
    return groups


def request_id(messages: Sequence[Message]) -> str:
    """webhook-id of the request: the message's own, or one that the same messages give again."""
    if len(messages) == 1:
        return messages[0].message_id
    return str(uuid.uuid5(_NAMESPACE, ",".join(message.message_id for message in messages)))


def body(endpoint: Endpoint, messages: Sequence[Message]) -> tuple[str, str | None]:
    """Body and content type; None leaves the endpoint's own."""
    if endpoint.batch_format == "cloudevents" and endpoint.cloudevents is not None:
        events = [cloudevents.structured(endpoint.cloudevents, message) for message in messages]
        return "[" + ",".join(events) + "]", cloudevents.BATCH
    return "[" + ",".join(message.payload for message in messages) + "]", None
