"""TLS: which certificates are trusted, and which are presented."""

from __future__ import annotations

import base64
import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from support.deliveries import Exchanges, patient
from support.http2 import Http2Receiver
from support.receiver import Certificate, Receiver, make_certificate
from ulak.safety.address import Guard
from ulak.transports.http.model import Finished, Request


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[Receiver]:
    with Receiver(certificate=certificate) as receiver:
        yield receiver


def post(exchanges: Exchanges, url: str, **profile: Any) -> Finished:
    exchanges.start(Request(patient(url, **profile), [], b"{}"))
    while True:
        for finished in exchanges.step(0.1):
            return finished


def test_a_trusted_authority_opens_the_connection(
    exchanges: Exchanges, secure: Receiver, certificate: Certificate
) -> None:
    bundle = str(certificate.certificate)

    assert post(exchanges, secure.url, tls_ca_bundle=bundle).status == 200
    assert post(exchanges, secure.on("localhost"), tls_ca_bundle=bundle).status == 200


def test_without_verification_anybody_is_trusted_but_only_then(exchanges: Exchanges, secure: Receiver) -> None:
    assert post(exchanges, secure.url, ssl_verify=False).status == 200
    assert post(exchanges, secure.url).kind == "tls"


def test_a_configs_authorities_replace_the_systems(
    exchanges: Exchanges, secure: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: Certificate
) -> None:
    other = make_certificate(tmp_path)
    monkeypatch.setattr("ulak.transports.http.client._SYSTEM_AUTHORITIES", str(certificate.certificate))

    assert post(exchanges, secure.url).status == 200
    assert post(exchanges, secure.url, tls_ca_bundle=str(other.certificate)).kind == "tls"


@pytest.mark.parametrize("trust", ["file", "nobody"])
def test_the_systems_folder_of_authorities_is_left_unread(
    exchanges: Exchanges, secure: Receiver, certificate: Certificate, trust: str
) -> None:
    def bytes_read() -> int:
        """By this thread."""
        return int(Path("/proc/thread-self/io").read_text().split()[1])

    options: dict[str, Any] = (
        {"tls_ca_bundle": str(certificate.certificate)} if trust == "file" else {"ssl_verify": False}
    )
    # What is read only once in a process has been read.
    other = Exchanges(Guard(allow_internal=True))
    post(other, secure.url, **options)
    other.close()
    before = bytes_read()

    assert post(exchanges, secure.url, **options).status == 200

    # The folder holds some 200 kB; read, its authorities would be trusted beside the file's.
    assert bytes_read() - before < 50_000


def test_a_missing_authority_file_is_the_configs_fault(exchanges: Exchanges, secure: Receiver) -> None:
    finished = post(exchanges, secure.url, tls_ca_bundle="/nowhere/ca.pem")

    assert finished.kind in ("config", "tls")
    assert secure.requests == []


def test_a_pinned_key_must_match(exchanges: Exchanges, secure: Receiver, certificate: Certificate) -> None:
    public_key = x509.load_pem_x509_certificate(certificate.certificate.read_bytes()).public_key()
    encoded = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    pin = "sha256//" + base64.b64encode(hashlib.sha256(encoded).digest()).decode()
    bundle = str(certificate.certificate)

    assert post(exchanges, secure.url, tls_ca_bundle=bundle, tls_pinned_public_key=pin).status == 200
    wrong = "sha256//" + base64.b64encode(bytes(32)).decode()
    assert post(exchanges, secure.url, tls_ca_bundle=bundle, tls_pinned_public_key=wrong).kind == "tls"


def test_a_client_certificate_is_presented(exchanges: Exchanges, certificate: Certificate, tmp_path: Path) -> None:
    client = make_certificate(tmp_path, names=("client",), file="client")
    with Receiver(certificate=certificate) as strict:
        assert strict._context is not None
        strict._context.verify_mode = ssl.CERT_REQUIRED
        strict._context.load_verify_locations(client.certificate)
        bundle = str(certificate.certificate)

        without = post(exchanges, strict.url, tls_ca_bundle=bundle)
        presented = post(
            exchanges,
            strict.url,
            tls_ca_bundle=bundle,
            tls_client_cert=str(client.certificate),
            tls_client_key=str(client.key),
        )

    assert without.kind in ("tls", "network")
    assert presented.status == 200


def test_receivers_that_offer_http_2_share_one_connection(exchanges: Exchanges, certificate: Certificate) -> None:
    with Http2Receiver(certificate) as receiver:
        profile = patient(receiver.url, tls_ca_bundle=str(certificate.certificate))
        for number in range(30):
            exchanges.start(Request(profile, [], b"%d" % number, number))
        finished: list[Finished] = []
        while len(finished) < 30:
            finished += exchanges.step(0.1)

        assert {each.status for each in finished} == {200}
        assert sorted(int(body) for body in receiver.bodies) == list(range(30))
        assert receiver.connections == 1
