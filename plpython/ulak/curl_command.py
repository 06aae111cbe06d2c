"""A request as a curl command to paste into a shell, with its secrets masked."""

from __future__ import annotations

import shlex

from ulak import header
from ulak.model import Request

MASK = "****"
_SECRET = frozenset(("authorization", "cookie", "proxy-authorization", "webhook-signature", "x-amz-security-token"))
_SECRET_PARTS = ("api-key", "apikey", "password", "secret", "signature", "token")


def render(request: Request) -> str:
    profile = request.profile
    words = ["curl", "--include", "--request", profile.method]
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
            words += [option, value]
    if profile.proxy is not None:
        words += ["--proxy", profile.proxy.url]
        if profile.proxy.username is not None:
            words += ["--proxy-user", f"{profile.proxy.username}:{MASK}"]
    else:
        words += ["--noproxy", "*"]
    for line in request.headers:
        name, value = header.split(line)
        words += ["--header", f"{name}: {_masked(name, value)}" if value else f"{name};"]
    words += ["--data-binary", request.body.decode("utf-8", "replace"), profile.url]
    return shlex.join(words)


def _masked(name: str, value: str) -> str:
    if name not in _SECRET and not any(part in name for part in _SECRET_PARTS):
        return value
    scheme, space, _ = value.partition(" ")
    # The scheme helps to see what is wrong and gives nothing away.
    return f"{scheme} {MASK}" if space and name == "authorization" else MASK
