"""The files that libcurl will read for a profile."""

from __future__ import annotations

from collections.abc import Iterator

from ulak.safety.files import CERTIFICATE, PRIVATE_KEY, PUBLIC_KEY
from ulak.transports.http.model import Profile

# How libcurl tells a hash from a file.
_HASH = "sha256//"


def named(profile: Profile) -> Iterator[tuple[str, bytes]]:
    """Their paths, and what each must hold."""
    if profile.url.lower().startswith("https:"):
        if profile.ssl_verify and profile.tls_ca_bundle is not None:
            yield profile.tls_ca_bundle, CERTIFICATE
        if profile.tls_client_cert is not None:
            yield profile.tls_client_cert, CERTIFICATE
        if profile.tls_client_key is not None:
            yield profile.tls_client_key, PRIVATE_KEY
        if profile.tls_pinned_public_key is not None and not profile.tls_pinned_public_key.startswith(_HASH):
            yield profile.tls_pinned_public_key, PUBLIC_KEY
    proxy = profile.proxy
    if proxy is not None and proxy.ssl_verify and proxy.ca_bundle is not None:
        yield proxy.ca_bundle, CERTIFICATE
