"""Signatures: Standard Webhooks (HMAC-SHA256 or Ed25519 over id, timestamp and body, one per secret), or an HMAC of the
body."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence

from ulak.transports.http import ed25519
from ulak.transports.http.model import ConfigError, Signature, SigningKey

_PREFIX = "whsec_"


def key(secret: str) -> SigningKey:
    """The signing key: whsk_ is an Ed25519 key, whsec_ is base64, any other text is used unchanged."""
    if secret.startswith(ed25519.PREFIX):
        return ed25519.signer(secret)
    if not secret.startswith(_PREFIX):
        return secret.encode()
    text = secret.removeprefix(_PREFIX).rstrip("=")
    try:
        # Padding is often lost on the way.
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ConfigError("signing secret starts with whsec_ but isn't base64") from error


def sign(keys: Sequence[SigningKey], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature; several signatures while a secret is being rotated, newest first."""
    content = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    return " ".join([_signed(key, content) for key in keys])


def _signed(key: SigningKey, content: bytes) -> str:
    if isinstance(key, bytes):
        return "v1," + b64encode(hmac.digest(key, content, "sha256")).decode()
    return "v1a," + b64encode(key(content)).decode()


def of_body(scheme: Signature, keys: Sequence[SigningKey], body: bytes) -> str:
    """The value of the scheme's header. It holds one signature: during a rotation, the new secret's."""
    key = keys[0]
    assert isinstance(key, bytes)
    digest = hmac.digest(key, body, scheme.algorithm)
    return scheme.prefix + (digest.hex() if scheme.encoding == "hex" else b64encode(digest).decode())
