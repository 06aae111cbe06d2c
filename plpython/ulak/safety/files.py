"""Files that a config names: small, regular, and looked at without waiting for anybody."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from ulak.messages.delivery import ConfigError

LARGEST = 1024 * 1024
# One text for every reason; otherwise a config could find out which files exist, and which the server may read.
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
    """A file that was checked; whether it is still the same can be seen without opening it."""

    path: str
    identity: _Identity

    def has_changed(self) -> bool:
        try:
            return _identity(os.stat(self.path)) != self.identity
        except OSError:
            return True


def check(named: Iterable[tuple[str, bytes]]) -> tuple[Checked, ...]:
    """Paths, and what each file must hold; raises ConfigError if one of them is anything but that.

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
        if content not in data and not (content is PUBLIC_KEY and data.startswith(b"0")):
            raise ValueError
    finally:
        os.close(descriptor)
    return Checked(path, _identity(found)), data


def _identity(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
