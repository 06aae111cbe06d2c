"""What must be masked in texts that leave ulak: secrets of a config, and quotations of a payload."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus, unquote, urlsplit

from ulak.safety import text
from ulak.safety.mask import MASK, SHORTEST, is_secret_header
from ulak.transports.http import header
from ulak.transports.http.model import Line, Request, Signature

# Parts of a credential that are long enough to be one themselves.
_CREDENTIAL = re.compile(r"[^\s,;=\"]{20,}")

# Searching takes 10 ms per 100 kB of small values. With larger payloads, nothing of the answer is quoted instead.
_LARGEST_SEARCHED = 64 * 1024
# Characters of the payload that count as a quotation. Every quotation of 2 * _QUOTATION - 1 or more is found.
_QUOTATION = 12
_PIECES = re.compile("[/?&=;]")
_FIELD_NAME = re.compile(r"[A-Za-z_$][A-Za-z_.$-]*")
# Headers that ulak sets; they contain nothing from the sender.
_OWN_HEADERS = frozenset(("content-type", "ulak-attempt", "user-agent", "webhook-id", "webhook-timestamp"))


def secrets(config: Mapping[str, Any], signing_secrets: Iterable[str], named: Iterable[str]) -> Iterator[str]:
    """The secret values of a config: those that it names by $secret (`named`), and all credentials."""
    named = set(named)
    yield from named
    for secret in signing_secrets:
        yield secret
        yield secret.removeprefix("whsec_").removeprefix("whsk_").rstrip("=")
    auth = config.get("auth") or {}
    for key in ("password", "token", "client_secret", "access_key", "secret_key", "session_token"):
        if key in auth:
            yield str(auth[key])
    if auth.get("credentials") == "body":
        yield quote_plus(str(auth.get("client_secret")))
    proxy = config.get("proxy") or {}
    if "password" in proxy:
        yield str(proxy["password"])
    for user, password in (
        (auth.get("username"), auth.get("password")),
        (proxy.get("username"), proxy.get("password")),
        (quote_plus(str(auth.get("client_id"))), quote_plus(str(auth.get("client_secret")))),
    ):
        if password is not None:
            yield b64encode(f"{user}:{password}".encode()).decode().rstrip("=")
    # If a whole URL is a secret, so is its host, which errors name.
    for url in (config.get("url"), proxy.get("url"), auth.get("token_url")):
        if url in named:
            yield from _location(str(url))
            yield urlsplit(str(url)).hostname or ""


def locations(config: Mapping[str, Any]) -> Iterator[str]:
    """What only roles with access to configs may see: the part of a URL after the host, often a token, and paths of
    files."""
    for key in ("tls_ca_bundle", "tls_client_cert", "tls_client_key"):
        yield config.get(key) or ""
    yield (config.get("proxy") or {}).get("ca_bundle") or ""
    for url in (config.get("url"), (config.get("auth") or {}).get("token_url"), (config.get("proxy") or {}).get("url")):
        if isinstance(url, str):
            yield from _location(url)


def _location(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    yield url
    yield f"{parts.path}?{parts.query}" if parts.query else parts.path
    yield parts.path
    yield parts.query
    for segment in parts.path.split("/"):
        # Not every word of a path: "orders" may be part of an error.
        if len(segment) >= 8 and any(letter.isdigit() for letter in segment):
            yield segment
    for pair in parts.query.split("&"):
        _, _, value = pair.partition("=")
        yield value
        yield unquote(value)


def is_credential(name: str, scheme: Signature | None) -> bool:
    """Whether a header (lower case) holds a credential or a signature, by its name or by the config."""
    return is_secret_header(name) or (scheme is not None and name == scheme.header.lower())


def credentials(lines: Iterable[Line], scheme: Signature | None) -> Iterator[str]:
    """The values of header lines that hold a credential or a signature."""
    for each in lines:
        name, value = header.split(each)
        if is_credential(name, scheme):
            yield value
            # Without the scheme: Bearer, v1, AWS4-HMAC-SHA256.
            yield value.partition(" ")[2]
            yield from _CREDENTIAL.findall(value)


def own_path(request: Request, url: str) -> Iterator[str]:
    """The URL with a message's own path, whole and in pieces."""
    if request.profile.url == url:
        return
    parts = urlsplit(request.profile.url)
    yield f"{parts.path}?{parts.query}"
    yield parts.path
    yield parts.query
    known = set(_PIECES.split(url))
    for piece in _PIECES.split(f"{parts.path}?{parts.query}"):
        if piece not in known:
            yield piece
            yield unquote(piece)


def hide_payload(answer: str, request: Request, endpoint_lines: Sequence[Line], url: str | None = None) -> str:
    """The answer with quotations of the message masked, or nothing if that isn't possible. Names of fields stay, since
    they help. `url` is the endpoint's, if the message may have its own path."""
    if len(request.body) > _LARGEST_SEARCHED:
        return ""
    try:
        # Numbers as they are written.
        document = json.loads(request.body or b"null", parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return ""
    sent = set(_values(document))
    sent.update(_own_headers(request, endpoint_lines))
    if url is not None:
        sent.update(own_path(request, url))
    lowered = answer.lower()
    # A single character reveals nothing; two or three only as a whole word.
    found = [each for each in sent if len(each) >= 2 and each.lower() in lowered]
    if found:
        found.sort(key=len, reverse=True)
        words = (re.escape(each) if len(each) >= SHORTEST else rf"(?<!\w){re.escape(each)}(?!\w)" for each in found)
        answer = re.sub("|".join(words), MASK, answer, flags=re.IGNORECASE)
    long_texts = "\n".join(each.lower() for each in sent if len(each) >= _QUOTATION)
    return "" if _quotes(answer.lower(), long_texts) else answer


def _values(document: object) -> Iterator[str]:
    """Every text and number, and keys that look like data rather than names."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, str):
            # On one line, like the answer.
            yield value.strip() if value.isprintable() and "  " not in value else text.line(value, _LARGEST_SEARCHED)
            if not value.isascii() or '"' in value or "\\" in value:
                yield text.line(json.dumps(value)[1:-1], _LARGEST_SEARCHED)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            left += (key for key in value if not _FIELD_NAME.fullmatch(key))


def _own_headers(request: Request, endpoint_lines: Sequence[Line]) -> Iterator[str]:
    for each in request.headers:
        if each not in endpoint_lines:
            name, value = header.split(each)
            if name not in _OWN_HEADERS:
                yield value


def _quotes(answer: str, long_texts: str) -> bool:
    """Whether the answer contains a piece of a long text that is too long to be a coincidence."""
    starts = range(0, len(answer) - _QUOTATION + 1, _QUOTATION)
    return any(answer[start : start + _QUOTATION] in long_texts for start in starts)
