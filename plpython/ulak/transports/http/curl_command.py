"""A request as a curl command to paste into a shell, with its secrets masked."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from ulak.safety.mask import MASK
from ulak.transports.http import header, secrecy
from ulak.transports.http.model import Endpoint, Request

_SCHEMES = frozenset(("apikey", "aws4-hmac-sha256", "basic", "bearer", "digest", "token"))


def render(request: Request, endpoint: Endpoint, payloads: Collection[str]) -> str:
    """A body that is the payload (one of these) is shown as it is; everything else without what is secret."""
    mask = endpoint.mask
    profile = request.profile
    # Nothing in the words but the body and the lines is to mean anything: no {a,b} in a url, no @file.
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
    """For a shell. What a terminal would obey or not show is written as the bytes that it is."""
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
    # The scheme helps to see what is wrong and gives nothing away.
    return f"{scheme} {MASK}" if space and scheme.lower() in _SCHEMES else MASK
