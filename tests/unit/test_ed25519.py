"""Ed25519 signatures, checked with libsodium."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey
from ulak.messages.delivery import ConfigError
from ulak.transports.http import signature

ID = "msg_2KWPBgLlAfxdpx2AI54pPJ85f4W"


def secret(seed: bytes, public: bytes = b"") -> str:
    return "whsk_" + b64encode(seed + public).decode()


def verify(public: bytes, body: bytes, signed: str) -> None:
    version, _, given = signed.partition(",")
    assert version == "v1a"
    VerifyKey(public).verify(b"%b.1.%b" % (ID.encode(), body), b64decode(given))


@given(seed=st.binary(min_size=32, max_size=32), body=st.binary(), whole=st.booleans(), padded=st.booleans())
def test_libsodium_accepts_what_a_key_signed(seed: bytes, body: bytes, whole: bool, padded: bool) -> None:
    public = bytes(SigningKey(seed).verify_key)
    text = secret(seed, public if whole else b"")
    text = text if padded else text.rstrip("=")

    verify(public, body, signature.sign([signature.key(text)], ID, 1, body))


def test_libsodium_refuses_another_body() -> None:
    seed = bytes(range(32))
    signed = signature.sign([signature.key(secret(seed))], ID, 1, b"{}")

    with pytest.raises(BadSignatureError):
        verify(bytes(SigningKey(seed).verify_key), b"[]", signed)


def test_while_keys_rotate_each_signs_in_its_own_way() -> None:
    seed = bytes(range(32))
    keys = [signature.key(text) for text in (secret(seed), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")]

    new, old = signature.sign(keys, ID, 1, b"{}").split()

    verify(bytes(SigningKey(seed).verify_key), b"{}", new)
    assert old.startswith("v1,")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("whsk_short", "must have 32 or 64 bytes"),
        ("whsk_!", "must have 32 or 64 bytes"),
        (secret(bytes(32), bytes(32)), "isn't that of its seed"),
    ],
)
def test_an_invalid_key_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        signature.key(text)
