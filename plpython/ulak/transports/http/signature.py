"""Signatures: Standard Webhooks (HMAC-SHA256 over id, timestamp and body, one per secret), or an HMAC of the body."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence

from ulak.transports.http.model import ConfigError, Signature

_PREFIX = "whsec_"


def key(secret: str) -> bytes:
    """The bytes to sign with: whsec_ secrets are base64, any other text is used as it is."""
    if not secret.startswith(_PREFIX):
        return secret.encode()
    text = secret.removeprefix(_PREFIX).rstrip("=")
    try:
        # Padding is often lost on the way.
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ConfigError("signing secret starts with whsec_ but isn't base64") from error


def sign(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature; several signatures while a secret is being rotated, newest first."""
    content = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    digests = [b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys]
    return " ".join(["v1," + digest for digest in digests])


def of_body(scheme: Signature, keys: Sequence[bytes], body: bytes) -> str:
    """The value of the scheme's header. It has room for one signature: while a secret rotates, the new one counts."""
    digest = hmac.digest(keys[0], body, scheme.algorithm)
    return scheme.prefix + (digest.hex() if scheme.encoding == "hex" else b64encode(digest).decode())
