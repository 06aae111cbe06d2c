"""A request as a curl command to paste into a shell, with its secrets masked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ulak.messages.delivery import EndpointConfig
from ulak.safety.mask import MASK
from ulak.transports.http import endpoint as endpoints
from ulak.transports.http import header, request, secrecy
from ulak.transports.http.model import Endpoint, Message, OAuth2, Request, Settings

_SCHEMES = frozenset(("apikey", "aws4-hmac-sha256", "basic", "bearer", "digest", "token"))


def curl(given: Mapping[str, Any], now: float) -> str:
    """The request of a message as it would be sent now. `given` holds endpoint, settings, version and message, as
    ulak.curl() gathers them."""
    config = EndpointConfig(**given["endpoint"])
    parsed = endpoints.parse(config, Settings.of(given["settings"], given["version"]))
    # The reader doesn't need a real token, and fetching one would be a request.
    token = MASK if isinstance(parsed.auth, OAuth2) else None
    message = Message(**given["message"])
    raw = json.loads(message.payload)
    payloads = [message.payload, *([raw] if isinstance(raw, str) else [])]
    return render(request.build(parsed, [message], now, token), parsed, payloads)


def render(request: Request, endpoint: Endpoint, payloads: Collection[str]) -> str:
    """A body that is one of these payloads is shown unchanged; in everything else secrets are masked."""
    mask = endpoint.mask
    profile = request.profile
    # curl must not interpret the arguments: no {a,b} in a URL, no @file.
    words = ["curl", "--globoff", "--include", "--request", profile.method]
    words += ["--max-time", f"{profile.timeout:g}", "--connect-timeout", f"{profile.connect_timeout:g}"]
    if not profile.ssl_verify:
        words.append("--insecure")
    for option, value in (
        ("--cacert", profile.tls_ca_bundle),
        ("--cert", profile.tls_client_cert),
        ("--key", profile.tls_client_key),
        ("--pinnedpubkey", profile.tls_pinned_public_key),
    ):
        if value is not None:
            words += [option, mask.hide(value)]
    if profile.proxy is not None:
        words += ["--proxy", mask.hide(profile.proxy.url)]
        if profile.proxy.username is not None:
            words += ["--proxy-user", f"{mask.hide(profile.proxy.username)}:{MASK}"]
    else:
        words += ["--noproxy", "*"]
    for line in request.headers:
        name, value = header.split(line)
        shown = mask.hide(name)
        words += ["--header", f"{shown}: {_masked(name, value, endpoint)}" if value else f"{shown};"]
    body = request.body.decode("utf-8", "replace")
    words += ["--data-raw", body if body in payloads else mask.hide(body), mask.hide(profile.url)]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quoted for a shell. Unprintable characters are written as escaped bytes."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_escaped(letter) for letter in word) + "'"


def _escaped(letter: str) -> str:
    if letter in "\\'":
        return "\\" + letter
    return letter if letter.isprintable() else "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "replace"))


def _masked(name: str, value: str, endpoint: Endpoint) -> str:
    if not secrecy.is_credential(name, endpoint.signature):
        return endpoint.mask.hide(value)
    scheme, space, _ = value.partition(" ")
    # The scheme helps to find mistakes, and isn't secret.
    return f"{scheme} {MASK}" if space and scheme.lower() in _SCHEMES else MASK
