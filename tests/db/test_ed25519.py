"""Ed25519 keys: made, rotated and shown by their public half alone."""

from __future__ import annotations

import json
from base64 import b64decode, urlsafe_b64decode
from typing import Any

import pytest
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


def test_without_the_package_nothing_changes_and_the_error_names_it(db: DB) -> None:
    queue = Queue(db)
    queue.endpoint("shop", {"url": "https://example.com", "signature": {"scheme": "ed25519"}}, protocol="http")
    queue.db.execute("do $$ import sys; sys.modules['cryptography'] = None $$ language plpython3u")

    error = queue.refuses("rotate_secret", "shop")

    assert (error.sqlstate, error.message_hint) == (
        "55000",
        "As root on the server: apt-get install python3-cryptography",
    )
    assert signs_with(queue) == []
