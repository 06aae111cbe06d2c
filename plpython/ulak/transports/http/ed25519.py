"""Ed25519 keys of Standard Webhooks: whsk_ and the seed in base64, optionally followed by the public key."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable

from ulak.messages.delivery import ConfigError

PREFIX = "whsk_"
PACKAGE = "python3-cryptography"


def signer(secret: str) -> Callable[[bytes], bytes]:
    """A function that signs with this key. Raises ConfigError, also if the package is missing."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(f"{PACKAGE} isn't installed where the worker runs, and a key whsk_ needs it") from error
    seed, public = _halves(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if public and public != _raw(key):
        raise ConfigError("the public key in the signing secret whsk_ isn't that of its seed")
    return key.sign


def _raw(key: object) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    assert isinstance(key, Ed25519PrivateKey)
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _halves(secret: str) -> tuple[bytes, bytes]:
    text = secret.removeprefix(PREFIX).rstrip("=")
    try:
        # Padding is often lost on the way.
        key = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        key = b""
    if len(key) not in (32, 64):
        raise ConfigError("a signing secret whsk_ must have 32 or 64 bytes in base64")
    return key[:32], key[32:]
