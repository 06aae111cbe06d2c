"""A request as a curl command to paste into a shell, with its secrets masked."""

from __future__ import annotations

import shlex

from ulak.http import header, secrecy
from ulak.http.model import Endpoint, Request
from ulak.mask import MASK

_SCHEMES = frozenset(("apikey", "aws4-hmac-sha256", "basic", "bearer", "digest", "token"))


def render(request: Request, endpoint: Endpoint) -> str:
    """The payload is shown as it is; of everything that the endpoint's config holds, what is secret is hidden."""
    mask = endpoint.mask
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
            words += [option, mask.hide(value)]
    if profile.proxy is not None:
        words += ["--proxy", mask.hide(profile.proxy.url)]
        if profile.proxy.username is not None:
            words += ["--proxy-user", f"{mask.hide(profile.proxy.username)}:{MASK}"]
    else:
        words += ["--noproxy", "*"]
    for line in request.headers:
        name, value = header.split(line)
        words += ["--header", f"{name}: {_masked(name, value, endpoint)}" if value else f"{name};"]
    words += ["--data-binary", request.body.decode("utf-8", "replace"), mask.hide(profile.url)]
    return shlex.join(words)


def _masked(name: str, value: str, endpoint: Endpoint) -> str:
    if not secrecy.is_credential(name, endpoint.signature):
        return endpoint.mask.hide(value)
    scheme, space, _ = value.partition(" ")
    # The scheme helps to see what is wrong and gives nothing away.
    return f"{scheme} {MASK}" if space and scheme.lower() in _SCHEMES else MASK
