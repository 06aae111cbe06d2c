"""Ed25519 keys: made, rotated and shown by their public half alone."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode, urlsafe_b64decode
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nacl.signing import SigningKey
from support.queue import DB, Queue

DAY = 86400
SECRETS = "select signing_secrets from ulak_private.endpoint_configs(array[%s], %s)"


@pytest.fixture
def shop(queue: Queue) -> Queue:
    queue.endpoint("shop", {"url": "https://example.com", "signature": {"scheme": "ed25519"}}, protocol="http")
    return queue


def keys(queue: Queue, now: float = 0) -> list[Any]:
    return list(json.loads(queue.call("public_keys", "shop", now=queue.at(now)))["keys"])


def signs_with(queue: Queue, now: float = 0) -> list[str]:
    return list(queue.value(SECRETS, queue.circuit("shop")["id"], queue.at(now)))


def test_a_new_key_is_shown_by_its_public_half_alone(shop: Queue) -> None:
    shown = shop.call("rotate_secret", "shop")

    (secret,) = signs_with(shop)
    public = bytes(SigningKey(b64decode(secret.removeprefix("whsk_"))).verify_key)
    assert b64decode(shown.removeprefix("whpk_")) == public


def test_the_key_set_has_the_old_key_until_its_grace_is_over(shop: Queue) -> None:
    shop.call("rotate_secret", "shop", now=shop.at(0))
    (old,) = keys(shop)
    shop.call("rotate_secret", "shop", "1 day", now=shop.at(0))

    new, still = keys(shop, now=DAY - 1)

    assert still == old
    assert keys(shop, now=DAY + 1) == [new]
    seed = b64decode(signs_with(shop)[0].removeprefix("whsk_"))
    assert urlsafe_b64decode(new["x"] + "=") == bytes(SigningKey(seed).verify_key)
    assert {name: new[name] for name in ("kty", "crv", "use", "alg")} == {
        "kty": "OKP",
        "crv": "Ed25519",
        "use": "sig",
        "alg": "EdDSA",
    }


def test_the_id_of_a_key_is_its_thumbprint(queue: Queue) -> None:
    """The example of RFC 8037, A.3."""
    seed = "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"
    secret = "whsk_" + seed.replace("-", "+").replace("_", "/") + "="
    queue.endpoint("shop", {"url": "https://example.com", "signing_secret": secret}, protocol="http")

    (key,) = keys(queue)

    assert key["x"] == "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    assert key["kid"] == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_a_receiver_of_hmac_has_time_to_change_over(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "https://example.com"}, protocol="http")
    queue.call("rotate_secret", "shop")
    config = queue.circuit("shop")["config"] | {"signature": {"scheme": "ed25519"}}
    queue.call("alter_endpoint", "shop", config)
    (hmac,) = signs_with(queue)

    queue.call("rotate_secret", "shop", now=queue.at(0))

    new, old = signs_with(queue)
    assert (new[:5], old) == ("whsk_", hmac)
    assert len(keys(queue)) == 1


def test_an_endpoint_without_such_a_key_has_no_key_set(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "https://example.com", "signing_secret": "a good secret"}, protocol="http")

    error = queue.refuses("public_keys", "shop")

    assert error.sqlstate == "22023"
    assert "select ulak.rotate_secret('shop');" in str(error.message_hint)
    assert queue.refuses("public_keys", "shoe").sqlstate == "42704"


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"signing_secret": "whsk_short"}, "$.signing_secret"),
        ({"signing_secret": "whsk_" + "A" * 43, "signature": {"scheme": "github"}}, "$.signing_secret"),
        ({"signature": {"scheme": "ed25519", "header": "x-signature"}}, "$.signature.header"),
    ],
)
def test_a_config_that_can_not_sign_is_refused(queue: Queue, config: Any, path: str) -> None:
    error = queue.refuses("create_endpoint", "shop", "http", {"url": "https://example.com", **config})

    assert error.sqlstate == "22023"
    assert path + " " in str(error.message_primary)


# The public half, which is computed in SQL.

PUBLIC = "select ulak_private.public_key(%s)"


@pytest.mark.parametrize(
    ("seed", "public"),
    [
        # RFC 8032, 7.1.
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        ),
        (
            "f5e5767cf153319517630f226876b86c8160cc583bc013744c6bf255f5cc0ee5",
            "278117fc144c72340f67d0f2316e8386ceffbf2b2428c9c51fef7c597f1d426e",
        ),
        (
            "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
            "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        ),
    ],
)
def test_the_public_half_is_that_of_the_standard(queue: Queue, seed: str, public: str) -> None:
    assert queue.value(PUBLIC, "whsk_" + b64encode(bytes.fromhex(seed)).decode()).hex() == public


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.binary(min_size=32, max_size=32), whole=st.booleans(), padded=st.booleans())
@example(seed=bytes(32), whole=False, padded=True)
@example(seed=bytes([255]) * 32, whole=True, padded=False)
def test_the_public_half_is_the_one_that_workers_sign_by(alone: DB, seed: bytes, whole: bool, padded: bool) -> None:
    key = Ed25519PrivateKey.from_private_bytes(seed)
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    text = b64encode(seed + (public if whole else b"")).decode()

    (found,) = alone.execute(PUBLIC, ["whsk_" + (text if padded else text.rstrip("="))]).fetchone() or (None,)

    assert found == public
