"""An nkey: an Ed25519 key in base32 that identifies whoever signs the server's nonce."""

from __future__ import annotations

import base64
import binascii
from itertools import pairwise
from typing import NamedTuple

from ulak.messages.delivery import ConfigError

_SEED = 18 << 3
_USER = 20 << 3


class Signer(NamedTuple):
    public: str
    seed: bytes

    def sign(self, nonce: str) -> str:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(nonce.encode())
        return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def signer(seed: str) -> Signer:
    """Signs with the key of a user's seed, SU... Raises ConfigError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    raw = _seed(seed)
    public = Ed25519PrivateKey.from_private_bytes(raw).public_key()
    encoding, form = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    key = bytes([_USER]) + public.public_bytes(encoding, form)
    return Signer(base64.b32encode(key + _checksum(key)).rstrip(b"=").decode(), raw)


def _seed(seed: str) -> bytes:
    try:
        padded = seed.encode("ascii") + b"=" * (-len(seed) % 8)
        decoded = base64.b32decode(padded)
    except (ValueError, binascii.Error):
        decoded = b""
    key, checksum = decoded[:-2], decoded[-2:]
    # Five bits say that it is a seed, the next eight of what kind.
    if len(key) != 34 or checksum != _checksum(key) or key[0] & 0xF8 != _SEED:
        raise ConfigError("nkey_seed isn't a seed")
    if (key[0] & 0x07) << 5 | key[1] >> 3 != _USER:
        raise ConfigError("nkey_seed isn't that of a user: it begins with SU")
    return key[2:]


def _checksum(key: bytes) -> bytes:
    return binascii.crc_hqx(key, 0).to_bytes(2, "little")


def credentials(text: str) -> tuple[str, str]:
    """JWT and seed out of a file of credentials. Raises ConfigError."""
    blocks = [line.strip() for line in text.splitlines()]
    # Each is on the line after its ---BEGIN ...---.
    found = [after for line, after in pairwise(blocks) if line.startswith("-") and "BEGIN" in line]
    if len(found) != 2:
        raise ConfigError("credentials_file doesn't have a JWT and a seed")
    return found[0], found[1]
