"""What is kept of an answer: status, headers but for the secret ones, the body up to its limit, and timing."""

from __future__ import annotations

import json
from typing import Any

from ulak.model import Finished

# Credentials and signatures, also those that a receiver echoes.
_SECRET = frozenset(
    (
        "authorization",
        "authentication-info",
        "cookie",
        "proxy-authenticate",
        "proxy-authorization",
        "set-cookie",
        "set-cookie2",
        "signature",
        "signature-input",
        "webhook-signature",
        "www-authenticate",
        "x-amz-security-token",
        "x-api-key",
    )
)
_MAX_HEADERS = 100
_MAX_HEADER_VALUE = 1024


def headers(finished: Finished) -> list[tuple[str, str]]:
    """Names (lower case) and values of the final answer, after those of a proxy or a 100 Continue."""
    found: list[tuple[str, str]] = []
    for raw in finished.headers:
        # jsonb can't hold NUL.
        text = raw.decode("latin-1").rstrip("\r\n").replace("\0", "\ufffd")
        if text.startswith("HTTP/"):
            found = []
            continue
        name, colon, value = text.partition(":")
        if colon:
            found.append((name.strip().lower(), value.strip()))
    return found


def capture(finished: Finished) -> str:
    """JSON text for the column response."""
    kept: dict[str, Any] = {"status": finished.status, "headers": _kept_headers(finished)}
    kept["body"] = finished.body.decode("utf-8", "replace").replace("\0", "\ufffd")
    if finished.truncated:
        kept["truncated"] = True
    if finished.error:
        kept["error"] = finished.error
    if finished.seconds is not None:
        kept["total_ms"] = round(finished.seconds * 1000, 3)
    if finished.first_byte_seconds is not None:
        kept["first_byte_ms"] = round(finished.first_byte_seconds * 1000, 3)
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def _kept_headers(finished: Finished) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in headers(finished)[:_MAX_HEADERS]:
        if name in _SECRET or name.endswith(("-signature", "-token", "-secret")):
            continue
        value = value[:_MAX_HEADER_VALUE]
        kept[name] = f"{kept[name]}, {value}" if name in kept else value
    return kept
