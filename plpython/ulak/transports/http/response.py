"""The part of an answer that is stored: status, headers without secrets, body up to its limit, timing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from ulak.safety import text
from ulak.transports.http import secrecy
from ulak.transports.http.model import Endpoint, Finished

_MAX_HEADERS = 100
_MAX_HEADER_VALUE = 1024
# The answer to a batch is stored with each of its messages; all copies together take at most this.
_MAX_OF_BATCH = 4 * 1024 * 1024


def headers(finished: Finished) -> list[tuple[str, str]]:
    """Names (lower case) and values of the final answer, after those of a proxy or a 100 Continue."""
    found: list[tuple[str, str]] = []
    for raw in finished.headers:
        line = raw.decode("latin-1").rstrip("\r\n")
        if line.startswith("HTTP/"):
            found = []
            continue
        name, colon, value = line.partition(":")
        if colon:
            found.append((name.strip().lower(), value.strip()))
    return found


def capture(endpoint: Endpoint, finished: Finished, messages: int = 1) -> str:
    """JSON text for the column response, of which each of so many messages gets a copy."""
    # Half of it for the headers, half for the body.
    room = _MAX_OF_BATCH // messages // 2 if messages > 1 else sys.maxsize
    body = finished.body[:room]
    is_cut = finished.truncated or len(body) < len(finished.body)
    credentials = list(secrecy.credentials(finished.request.headers, endpoint.signature))

    def kept(given: str, is_cut: bool = False) -> str:
        # jsonb can't hold NUL.
        return text.storable(endpoint.mask.hide(given, credentials, is_cut))

    captured: dict[str, Any] = {"status": finished.status, "headers": _kept_headers(endpoint, finished, kept, room)}
    captured["body"] = kept(body.decode("utf-8", "replace"), is_cut)
    if is_cut:
        captured["truncated"] = True
    if finished.error:
        captured["error"] = text.line(kept(finished.error))
    if finished.seconds is not None:
        captured["total_ms"] = round(finished.seconds * 1000, 3)
    if finished.first_byte_seconds is not None:
        captured["first_byte_ms"] = round(finished.first_byte_seconds * 1000, 3)
    return json.dumps(captured, ensure_ascii=False, separators=(",", ":"))


def _kept_headers(endpoint: Endpoint, finished: Finished, kept: Callable[[str], str], room: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers(finished)[:_MAX_HEADERS]:
        # Credentials and signatures, also those that a receiver echoes.
        if secrecy.is_credential(name, endpoint.signature):
            continue
        name, value = kept(name), kept(value)[:_MAX_HEADER_VALUE]
        room -= len(name) + len(value)
        if room < 0:
            break
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found
