"""Files that a config names: they must be small regular files, and are checked without blocking."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from ulak.messages.delivery import ConfigError

LARGEST = 1024 * 1024
# One text for every reason, so that a config can't be used to find out which files exist or are readable.
PROBLEM = (
    "a file that the config names can't be used: each must be a regular file of at most 1 MB,"
    " in PEM format, that the server may read"
)
# What each kind of file must contain.
CERTIFICATE = b"CERTIFICATE-----"
PRIVATE_KEY = b"PRIVATE KEY-----"
PUBLIC_KEY = b"PUBLIC KEY-----"
NATS_CREDENTIALS = b"NATS USER JWT-----"

_Identity = tuple[int, int, int, int]


class Checked(NamedTuple):
    """A file that was checked, and how to see without opening it whether it has changed."""

    path: str
    identity: _Identity

    def has_changed(self) -> bool:
        try:
            return _identity(os.stat(self.path)) != self.identity
        except OSError:
            return True


def check(named: Iterable[tuple[str, bytes]]) -> tuple[Checked, ...]:
    """Checks paths and what each file must contain. Raises ConfigError.

    Libraries open them by name, again for each connection, and would wait at a FIFO or read a device without end.
    """
    return tuple(_judged(path, content)[0] for path, content in named)


def read(path: str, content: bytes) -> bytes:
    """The content of such a file; raises ConfigError."""
    return _judged(path, content)[1]


def _judged(path: str, content: bytes) -> tuple[Checked, bytes]:
    try:
        return _check(path, content)
    except (OSError, ValueError):
        raise ConfigError(PROBLEM) from None


def _check(path: str, content: bytes) -> tuple[Checked, bytes]:
    # Don't open a device: for some that has an effect. A file in /proc may be another one a moment later.
    if os.path.abspath(path).startswith("/proc/") or not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise ValueError
        data = os.read(descriptor, LARGEST)
        # A public key may also be DER, of which only the first byte is known.
        if content not in data and not (content is PUBLIC_KEY and data.startswith(b"0")):
            raise ValueError
    finally:
        os.close(descriptor)
    return Checked(path, _identity(found)), data


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
