"""Signatures, checked with an implementation that isn't ours."""

from __future__ import annotations

import base64
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError
from ulak.transports.http import signature
from ulak.transports.http.model import ConfigError

ID = "msg_2KWPBgLlAfxdpx2AI54pPJ85f4W"


def headers(secrets: list[str], body: bytes, message_id: str = ID) -> dict[str, str]:
    timestamp = int(time.time())
    signed = signature.sign([signature.key(secret) for secret in secrets], message_id, timestamp, body)
    return {"webhook-id": message_id, "webhook-timestamp": str(timestamp), "webhook-signature": signed}


def test_the_published_example_gives_the_published_signature() -> None:
    key = signature.key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

    signed = signature.sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(secret=st.binary(min_size=1, max_size=64), payload=st.text())
def test_a_receiver_accepts_what_a_base64_secret_signed(secret: bytes, payload: str) -> None:
    text = "whsec_" + base64.b64encode(secret).decode()
    body = payload.encode("utf-8", "replace")

    Webhook(text).verify(body, headers([text], body), json_parse=False)


def test_a_base64_secret_may_have_lost_its_padding() -> None:
    assert signature.key("whsec_YWJjZA") == signature.key("whsec_YWJjZA==") == b"abcd"


def test_a_receiver_accepts_what_a_plain_secret_signed() -> None:
    Webhook(b"correct horse").verify(b"{}", headers(["correct horse"], b"{}"))


def test_during_a_rotation_either_secret_verifies() -> None:
    signed = headers(["new secret", "old secret"], b"{}")

    Webhook(b"new secret").verify(b"{}", signed)
    Webhook(b"old secret").verify(b"{}", signed)
    assert signed["webhook-signature"].count("v1,") == 2


def test_a_changed_body_is_refused() -> None:
    with pytest.raises(WebhookVerificationError):
        Webhook(b"correct horse").verify(b'{"a":2}', headers(["correct horse"], b'{"a":1}'))


def test_a_secret_that_only_looks_like_base64_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        signature.key("whsec_not base64!")
