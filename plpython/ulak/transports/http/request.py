"""The request for one message or a batch: body, headers and signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ulak.messages import cloudevents, event
from ulak.transports.http import batch, header, signature, sigv4
from ulak.transports.http.model import Endpoint, Line, Message, MessageError, Profile, Request, SigV4
from ulak.transports.http.template import Template

CORRELATION = "x-correlation-id"


def build(
    endpoint: Endpoint, messages: Sequence[Message], now: float, token: str | None = None, tag: object = None
) -> Request:
    """The request for these messages: several only in batch mode. `token` is for OAuth2."""
    message = messages[0]
    timestamp = int(now)
    if message.problem is not None:
        raise MessageError(message.problem)
    if (
        message.headers is None
        and message.correlation_id is None
        and endpoint.cloudevents is None
        and endpoint.batch_size == 1
        and endpoint.signature is None
        and endpoint.template is None
        and token is None
        and not isinstance(endpoint.auth, SigV4)
    ):
        # The hot path: the endpoint's lines unchanged, and no look-ups.
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
    given = message.headers if len(messages) == 1 else event.shared_headers(message)
    own = _NONE if given is None else _own_headers(given)
    headers = dict(endpoint.headers)
    headers.update(own.lines if not own.suspects else _without_credentials(endpoint, own.lines))

    text, fixed = _body(endpoint, messages, own)
    body = text.encode()
    request_id = batch.request_id(messages)
    fixed["webhook-id"] = request_id
    fixed["webhook-timestamp"] = str(timestamp)
    fixed["ulak-attempt"] = str(max(each.attempt for each in messages))
    correlations = {each.correlation_id for each in messages}
    if len(correlations) == 1 and message.correlation_id:
        fixed[CORRELATION] = message.correlation_id
    if endpoint.signing_keys and endpoint.signature is not None:
        fixed[endpoint.signature.header.lower()] = signature.of_body(endpoint.signature, endpoint.signing_keys, body)
    elif endpoint.signing_keys:
        fixed["webhook-signature"] = signature.sign(endpoint.signing_keys, request_id, timestamp, body)
    if token is not None:
        fixed["authorization"] = "Bearer " + token
    headers.update({name: header.line(name, value) for name, value in fixed.items()})
    profile = _profile(endpoint.profile, own.particular) if own.particular else endpoint.profile
    if isinstance(endpoint.auth, SigV4):
        headers.update(_sigv4(profile, endpoint.auth, headers, body, now))
    return Request(profile, list(headers.values()), body, tag)


def _profile(profile: Profile, particular: Mapping[str, str]) -> Profile:
    """With the message's path appended to the endpoint's, and its time-out if that is shorter."""
    if ":path" in particular:
        profile = profile._replace(url=_joined(profile.url, particular[":path"]))
    if ":timeout" in particular:
        timeout = min(profile.timeout, float(particular[":timeout"]))
        profile = profile._replace(timeout=timeout, connect_timeout=min(profile.connect_timeout, timeout))
    return profile


def _joined(url: str, path: str) -> str:
    """The path comes after the host, whatever it contains."""
    base, _, query = url.partition("?")
    more, _, more_query = path.partition("?")
    start = "" if base.count("/") > 2 else "/"
    text = f"{base}{start}".rstrip("/") + "/" + more.lstrip("/") if more else base + start
    return "?".join(filter(None, (text, "&".join(filter(None, (query, more_query))))))


def _body(endpoint: Endpoint, messages: Sequence[Message], own: _Own) -> tuple[str, dict[str, str]]:
    """The body, and the headers that depend on its format."""
    if endpoint.batch_size > 1:
        text, content_type = batch.body(endpoint, messages)
        decided = batch.headers(endpoint, messages)
        return text, {**decided, "content-type": content_type} if content_type else decided
    config, message = endpoint.cloudevents, messages[0]
    is_raw = own.particular.get(":body") == "raw"
    # A raw body is sent as it is.
    template = None if is_raw else _template(endpoint, own.values.get("ulak-event-type"))
    if template is not None:
        text = template.fill(message)
        if template.is_text:
            return text, {}
        message = message._replace(payload=text)
    if config is None:
        return cloudevents.raw_body(message) if is_raw else message.payload, {}
    traceparent, kind = own.values.get("traceparent"), own.values.get("content-type")
    found = cloudevents.represent(config, message, is_raw, traceparent, kind)
    headers = {f"ce-{name}": cloudevents.header_value(value) for name, value in found.attributes.items()}
    return found.body, {"content-type": found.content_type, **headers}


def _template(endpoint: Endpoint, event_type: str | None) -> Template | None:
    """The template of the most specific subscription that has one, or the endpoint's own."""
    if event_type is None or not endpoint.templates:
        return endpoint.template
    return next(filter(None, map(endpoint.templates.get, event.patterns(event_type))), endpoint.template)


class _Own(NamedTuple):
    """A message's headers by lower-case name, as lines and as values. Reserved names are left out: ulak sets those."""

    lines: Mapping[str, Line]
    values: Mapping[str, str]
    # Options of this request: their names start with a colon.
    particular: Mapping[str, str]
    # Headers that some endpoints use for authentication.
    suspects: Sequence[str] = ()


_NONE = _Own({}, {}, {})


# Messages of the same event have the same headers, and come one after the other.
@lru_cache(maxsize=64)
def _own_headers(text: str) -> _Own:
    given = event.headers_of(text)
    particular: dict[str, str] = {name: given.pop(name) for name in (":body", ":path", ":timeout") if name in given}
    lines: dict[str, Line] = {}
    values: dict[str, str] = {}
    for name, value in given.items():
        problem = header.problem(name, value)
        if problem:
            raise MessageError(f"the message's header {name!r} {problem}")
        lower = name.lower()
        key = header.key(name)
        if key not in header.RESERVED and (key == lower or not key.startswith(("ulak-", "webhook-"))):
            lines[lower] = header.line(name, value)
            values[lower] = value
    suspects = [name for name in lines if name == "authorization" or name.startswith("x-amz-") or "_" in name]
    return _Own(lines, values, particular, suspects)


def _without_credentials(endpoint: Endpoint, lines: Mapping[str, Line]) -> dict[str, Line]:
    return {name: line for name, line in lines.items() if not _is_credential(endpoint, name)}


def _is_credential(endpoint: Endpoint, name: str) -> bool:
    """Whether the endpoint uses this header for authentication. send() refuses it, but the config may change later."""
    key = header.key(name)
    if key == "authorization":
        return endpoint.auth is not None or key in endpoint.headers
    if key.startswith("x-amz-"):
        return isinstance(endpoint.auth, SigV4)
    return key != name and (key in endpoint.headers or key.startswith("ce-") or key == _signature_key(endpoint))


def _signature_key(endpoint: Endpoint) -> str | None:
    return None if endpoint.signature is None else header.key(endpoint.signature.header)


def _sigv4(profile: Profile, auth: SigV4, headers: dict[str, Line], body: bytes, now: float) -> dict[str, Line]:
    present = dict(header.split(line) for line in headers.values())
    added = sigv4.sign(auth, profile.method, profile.url, present, body, now)
    return {name: header.line(name, value) for name, value in added.items()}
