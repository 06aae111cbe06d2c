"""Header lines as libcurl takes them, and which names a config or a message can't set."""

from __future__ import annotations

import re

from ulak.transports.http.model import Line

# Set by ulak or libcurl. accept-encoding: compressed answers aren't supported.
RESERVED = frozenset(
    [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "accept-encoding",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        "ulak-attempt",
    ]
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def problem(name: str, value: object) -> str | None:
    """Why this header can't be sent, or None. A line break would smuggle in a header of the sender's choice."""
    if not _NAME.fullmatch(name):
        return "isn't a valid header name"
    if not isinstance(value, str):
        return "isn't text"
    if _CONTROL.search(value):
        return "has a control character"
    return None


def key(name: str) -> str:
    """Headers are compared by this: WSGI and CGI treat x_api_key and X-Api-Key as the same."""
    return name.lower().replace("_", "-")


def line(name: str, value: str) -> Line:
    # libcurl drops "name:" and sends "name;" as an empty header.
    text = f"{name}: {value}" if value.strip() else f"{name};"
    return text if text.isascii() else text.encode()


def split(text: Line) -> tuple[str, str]:
    """Name in lower case and value of a line that line() made."""
    if isinstance(text, bytes):
        text = text.decode()
    name, colon, value = text.partition(":")
    return (name.lower(), value.strip()) if colon else (name.rstrip(";").lower(), "")
