"""The request of one message, or of a batch: body, headers in their order of rank, and signature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ulak import batch, cloudevents, header, signature, sigv4
from ulak.model import Endpoint, Line, Message, MessageError, Request, SigV4

CORRELATION = "x-correlation-id"


def build(
    endpoint: Endpoint, messages: Sequence[Message], now: float, token: str | None = None, tag: object = None
) -> Request:
    """The request for these messages (more than one only in batch mode); token is OAuth2's."""
    message = messages[0]
    timestamp = int(now)
    if message.problem is not None:
        raise MessageError(message.problem)
    if (
        message.headers is None
        and message.correlation_id is None
        and endpoint.cloudevents is None
        and endpoint.batch_size == 1
        and token is None
        and not isinstance(endpoint.auth, SigV4)
    ):
        # The hot path: the endpoint's lines as they are, and nothing that needs a lookup.
        body = message.payload.encode()
        request_id = message.message_id
        lines = [
            *endpoint.lines,
            "webhook-id: " + request_id,
            f"webhook-timestamp: {timestamp}",
            f"ulak-attempt: {message.attempt}",
        ]
        if endpoint.signing_keys:
            lines.append("webhook-signature: " + signature.sign(endpoint.signing_keys, request_id, timestamp, body))
        return Request(endpoint.profile, lines, body, tag)
    return _build(endpoint, messages, now, token, tag)


def _build(endpoint: Endpoint, messages: Sequence[Message], now: float, token: str | None, tag: object) -> Request:
    message = messages[0]
    timestamp = int(now)
    headers = dict(endpoint.headers)
    own = _message_headers(endpoint, message if len(messages) == 1 else _without_event_id(message))
    headers.update({name.lower(): header.line(name, value) for name, value in own.items()})
    traceparent = next((value for name, value in own.items() if name.lower() == "traceparent"), None)

    text, fixed = _body(endpoint, messages, traceparent)
    body = text.encode()
    request_id = batch.request_id(messages)
    fixed["webhook-id"] = request_id
    fixed["webhook-timestamp"] = str(timestamp)
    fixed["ulak-attempt"] = str(max(each.attempt for each in messages))
    correlations = {each.correlation_id for each in messages}
    if len(correlations) == 1 and message.correlation_id:
        fixed[CORRELATION] = message.correlation_id
    if endpoint.signing_keys:
        fixed["webhook-signature"] = signature.sign(endpoint.signing_keys, request_id, timestamp, body)
    if token is not None:
        fixed["authorization"] = "Bearer " + token
    headers.update({name: header.line(name, value) for name, value in fixed.items()})
    if isinstance(endpoint.auth, SigV4):
        headers.update(_sigv4(endpoint, endpoint.auth, headers, body, now))
    return Request(endpoint.profile, list(headers.values()), body, tag)


def _body(endpoint: Endpoint, messages: Sequence[Message], traceparent: str | None) -> tuple[str, dict[str, str]]:
    """The body's text, and the headers that its format decides."""
    if endpoint.batch_size > 1:
        text, content_type = batch.body(endpoint, messages)
        return text, {"content-type": content_type} if content_type else {}
    config, message = endpoint.cloudevents, messages[0]
    if config is None:
        return message.payload, {}
    if config.mode == "binary":
        return message.payload, {
            "content-type": "application/json",
            **cloudevents.binary_headers(config, message, traceparent),
        }
    return cloudevents.structured(config, message, traceparent), {"content-type": cloudevents.STRUCTURED}


def _message_headers(endpoint: Endpoint, message: Message) -> dict[str, str]:
    """The message's own headers. A reserved name is left out: what ulak sets stands."""
    if message.headers is None:
        return {}
    try:
        given: Any = json.loads(message.headers)
    except RecursionError:
        given = None
    if not isinstance(given, dict):
        raise MessageError("the message's headers aren't a JSON object of names and texts")
    own = {}
    for name, value in given.items():
        problem = header.problem(name, value)
        if problem:
            raise MessageError(f"the message's header {name!r} {problem}")
        lower = name.lower()
        if lower in header.RESERVED or _is_credential(endpoint, lower):
            continue
        own[name] = value
    return own


def _without_event_id(message: Message) -> Message:
    """Several messages in one request are of several events."""
    return message._replace(headers=header.without_event_id(message.headers))


def _is_credential(endpoint: Endpoint, name: str) -> bool:
    """Whether the endpoint proves itself with this header. send() refuses it; the config may have changed since."""
    if name == "authorization":
        return endpoint.auth is not None or name in endpoint.headers
    return name.startswith("x-amz-") and isinstance(endpoint.auth, SigV4)


def _sigv4(endpoint: Endpoint, auth: SigV4, headers: dict[str, Line], body: bytes, now: float) -> dict[str, Line]:
    profile = endpoint.profile
    present = dict(header.split(line) for line in headers.values())
    added = sigv4.sign(auth, profile.method, profile.url, present, body, now)
    return {name: header.line(name, value) for name, value in added.items()}
