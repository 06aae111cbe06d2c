"""Requests signed with Ed25519, verified by Node with nothing but the endpoint's key set."""

from __future__ import annotations

import json
import subprocess

from support.receiver import Received, Receiver
from support.site import Site

VERIFY = """
const crypto = require("crypto");
const {keys, id, timestamp, body, signatures} = JSON.parse(require("fs").readFileSync(0));
const content = Buffer.from(`${id}.${timestamp}.${body}`);
console.log(JSON.stringify(keys.map(jwk => signatures.split(" ").some(signature =>
    signature.startsWith("v1a,") && crypto.verify(
        null, content, crypto.createPublicKey({key: jwk, format: "jwk"}), Buffer.from(signature.slice(4), "base64")
    )
))));
"""


def verified(site: Site, request: Received) -> list[bool]:
    """Whether a signature of the request fits, for each key of the set."""
    headers = request.headers
    given = {
        "keys": json.loads(site.call("public_keys", "shop"))["keys"],
        "id": headers["webhook-id"],
        "timestamp": headers["webhook-timestamp"],
        "body": request.body.decode(),
        "signatures": headers["webhook-signature"],
    }
    answer = subprocess.run(["node", "-e", VERIFY], input=json.dumps(given), capture_output=True, text=True, check=True)
    return list(json.loads(answer.stdout))


def test_both_keys_sign_during_a_rotation(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url, signature={"scheme": "ed25519"})
    site.call("rotate_secret", "shop")
    site.start()
    site.send(payload={"name": "Zoë"})
    (first,) = receiver.wait_for(1)
    assert verified(site, first) == [True]

    site.call("rotate_secret", "shop")
    site.send(payload={"name": "Zoë"})

    _, second = receiver.wait_for(2)
    assert verified(site, second) == [True, True]
    # The first request knows nothing of the new key.
    assert verified(site, first) == [False, True]


def test_curl_shows_no_key(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url, signature={"scheme": "ed25519"})
    site.call("rotate_secret", "shop")
    secret = site.value("select value from ulak_private.secrets")

    command = site.call("curl", site.send())

    assert "webhook-signature: ****" in command
    assert secret.removeprefix("whsk_").rstrip("=") not in command
