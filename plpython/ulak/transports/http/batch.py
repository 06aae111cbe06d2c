"""Several messages of one endpoint in one request: a JSON array, an array of envelopes, or a CloudEvents batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ulak.messages import cloudevents, event
from ulak.messages.delivery import grouped
from ulak.transports.http.model import Endpoint, Message

# A fixed namespace makes a batch's id a function of its messages' ids.
_NAMESPACE = "6f1a8c1e-6a3d-5c0b-9c3f-0b7a5b8f2d11"
# Lists the message ids of a JSON array, in its order: the elements are bare payloads.
IDS_HEADER = "ulak-message-ids"
# Receivers commonly refuse a header line above 8 kB; this many ids take 3.7.
MAX_IDS = 100
# Receivers commonly refuse bodies above a few megabytes.
MAX_BODY = 4 * 1024 * 1024


def group(endpoint: Endpoint, messages: Iterable[Message], max_body: int = MAX_BODY) -> list[list[Message]]:
    """Groups of messages that share a request, in order. Messages with different headers don't share one."""
    if endpoint.batch_size <= 1:
        return [[message] for message in messages]
    groups = grouped(messages, endpoint.batch_size, max_body, _are_alike)
    # Sorted, so that a retry has the same order.
    return [sorted(each, key=_id) if len(each) > 1 else each for each in groups]


def _are_alike(one: Message, other: Message) -> bool:
    """A message with a problem gets a request of its own, which fails alone."""
    return one.problem is None and other.problem is None and event.shared_headers(one) == event.shared_headers(other)


def _id(message: Message) -> int:
    return message.id


def request_id(messages: Sequence[Message]) -> str:
    """webhook-id of the request: the message's own; for a batch, one that is the same for the same messages."""
    if len(messages) == 1:
        return messages[0].message_id
    # Imported here, since workers without batches don't need it.
    from uuid import UUID, uuid5

    return str(uuid5(UUID(_NAMESPACE), ",".join(message.message_id for message in messages)))


def body(endpoint: Endpoint, messages: Sequence[Message]) -> tuple[str, str | None]:
    """Body and content type; None: the endpoint's own."""
    if endpoint.batch_format == "cloudevents" and endpoint.cloudevents is not None:
        events = [cloudevents.structured(endpoint.cloudevents, message) for message in messages]
        return "[" + ",".join(events) + "]", cloudevents.BATCH
    if endpoint.batch_format == "envelope":
        return "[" + ",".join(_envelope(message) for message in messages) + "]", None
    return "[" + ",".join(message.payload for message in messages) + "]", None


def headers(endpoint: Endpoint, messages: Sequence[Message]) -> dict[str, str]:
    if endpoint.batch_format != "json":
        return {}
    return {IDS_HEADER: ",".join(message.message_id for message in messages)}


def _envelope(message: Message) -> str:
    """The payload is JSON text already, so it is inserted unchanged."""
    head: dict[str, object] = {"id": message.message_id, "attempt": message.attempt}
    if message.created_at:
        head["time"] = cloudevents.rfc3339(message.created_at)
    if message.ordering_key:
        head["ordering_key"] = message.ordering_key
    if message.correlation_id:
        head["correlation_id"] = message.correlation_id
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":"))
    return f'{text[:-1]},"payload":{message.payload}}}'
