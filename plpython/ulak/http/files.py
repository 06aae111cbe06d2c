"""Files that a config names: small, regular, and looked at without waiting for anybody."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from ulak.http.model import ConfigError, Profile

LARGEST = 1024 * 1024
# One text whatever the reason: else a config could find out which files there are, and which the server may read.
PROBLEM = (
    "a file that the config names can't be used: each must be a regular file of at most 1 MB,"
    " in PEM format, that the server may read"
)
_CERTIFICATE = b"CERTIFICATE-----"
_PRIVATE_KEY = b"PRIVATE KEY-----"
_PUBLIC_KEY = b"PUBLIC KEY-----"
# How libcurl tells a hash from a file.
_HASH = "sha256//"

_Identity = tuple[int, int, int, int]


class Checked(NamedTuple):
    """A file that was found usable, and whether it is still the same can be seen without opening it."""

    path: str
    identity: _Identity

    def has_changed(self) -> bool:
        try:
            return _identity(os.stat(self.path)) != self.identity
        except OSError:
            return True


def check(profile: Profile) -> tuple[Checked, ...]:
    """The files that libcurl will read for this profile; raises ConfigError if one of them is anything but that.

    libcurl opens them by name, again for each connection, and would wait at a FIFO or read a device without end.
    """
    try:
        return tuple(_check(path, content) for path, content in _named(profile))
    except (OSError, ValueError):
        raise ConfigError(PROBLEM) from None


def _named(profile: Profile) -> Iterator[tuple[str, bytes]]:
    if profile.url.lower().startswith("https:"):
        if profile.ssl_verify and profile.tls_ca_bundle is not None:
            yield profile.tls_ca_bundle, _CERTIFICATE
        if profile.tls_client_cert is not None:
            yield profile.tls_client_cert, _CERTIFICATE
        if profile.tls_client_key is not None:
            yield profile.tls_client_key, _PRIVATE_KEY
        if profile.tls_pinned_public_key is not None and not profile.tls_pinned_public_key.startswith(_HASH):
            yield profile.tls_pinned_public_key, _PUBLIC_KEY
    proxy = profile.proxy
    if proxy is not None and proxy.ssl_verify and proxy.ca_bundle is not None:
        yield proxy.ca_bundle, _CERTIFICATE


def _check(path: str, content: bytes) -> Checked:
    # A device isn't even opened: for some that alone has an effect. What /proc has can be another thing a moment later.
    if os.path.abspath(path).startswith("/proc/") or not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise ValueError
        data = os.read(descriptor, LARGEST)
        # A public key may be DER, too, of which nothing but the first byte is sure.
        if content not in data and not (content is _PUBLIC_KEY and data.startswith(b"0")):
            raise ValueError
    finally:
        os.close(descriptor)
    return Checked(path, _identity(found))


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
