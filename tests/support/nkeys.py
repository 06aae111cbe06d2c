"""Keys of NATS and what is signed with them: a user's seed, and an operator with an account and a user's credentials."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3
_SEED = 18 << 3


class Key(NamedTuple):
    private: Ed25519PrivateKey
    kind: int

    @classmethod
    def create(cls, kind: int) -> Key:
        return cls(Ed25519PrivateKey.generate(), kind)

    @property
    def public(self) -> str:
        raw = self.private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return _encoded(bytes([self.kind]) + raw)

    @property
    def seed(self) -> str:
        form, none = serialization.PrivateFormat.Raw, serialization.NoEncryption()
        raw = self.private.private_bytes(serialization.Encoding.Raw, form, none)
        return _encoded(bytes([_SEED | self.kind >> 5, (self.kind & 31) << 3]) + raw)

    def token(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A JWT as NATS has it: its id is a hash of itself."""
        body = {
            "iat": 1_700_000_000,
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": {"version": 2, **claims},
        }
        digest = hashlib.new("sha512_256", json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_url(json.dumps(part).encode()) for part in (head, body))
        return f"{signed}.{_url(self.private.sign(signed.encode()))}"


class User(NamedTuple):
    public: str
    seed: str

    @classmethod
    def create(cls) -> User:
        key = Key.create(USER)
        return cls(key.public, key.seed)


def operator_mode() -> tuple[list[str], str]:
    """Lines of a server's configuration, and the credentials of a user that it lets in."""
    operator, account, user = Key.create(OPERATOR), Key.create(ACCOUNT), Key.create(USER)
    unlimited = dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1)
    limits = {**unlimited, "wildcards": True}
    of_operator = operator.token(operator.public, "operator", {"type": "operator"})
    of_account = operator.token(account.public, "account", {"type": "account", "limits": limits})
    of_user = account.token(user.public, "user", {"type": "user", "subs": -1, "data": -1, "payload": -1})
    preload = f"resolver_preload: {{{account.public}: {of_account}}}"
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return [f"operator: {of_operator}", "resolver: MEMORY", preload], credentials


def _encoded(key: bytes) -> str:
    return base64.b32encode(key + binascii.crc_hqx(key, 0).to_bytes(2, "little")).decode().rstrip("=")


def _url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
