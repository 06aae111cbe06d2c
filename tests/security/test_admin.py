"""An administrator who may write configs, but read no secret and no file of the server's."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.receiver import Certificate, Receiver
from support.site import Site

FILE_PROBLEM = (
    "[RETRYABLE] config: a file that the config names can't be used: each must be a regular file of at most 1 MB,"
    " in PEM format, that the server may read"
)
ONCE = {"max_retries": 0}


@pytest.fixture
def files(tmp_path: Path, certificate: Certificate) -> dict[str, str]:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no certificate\n")
    (tmp_path / "large").write_bytes(certificate.certificate.read_bytes() + b"\n" * 1024 * 1024)
    (tmp_path / "locked").write_bytes(certificate.certificate.read_bytes())
    (tmp_path / "locked").chmod(0)
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    found = {name: str(tmp_path / name) for name in ("fifo", "text", "large", "locked", "broken", "missing")}
    return found | {
        "folder": str(tmp_path),
        "endless": "/dev/zero",
        "empty": "/dev/null",
        "own_memory": "/proc/self/mem",
        "own_pipe": "/proc/self/fd/0",
    }


KEYS = ("tls_ca_bundle", "tls_client_cert", "tls_client_key", "tls_pinned_public_key", "proxy")


def config_with(key: str, path: str, url: str, certificate: Certificate) -> dict[str, Any]:
    trusted = {"tls_ca_bundle": str(certificate.certificate)}
    if key == "proxy":
        return {**trusted, "proxy": {"url": url, "ca_bundle": path}}
    if key == "tls_client_key":
        return {**trusted, "tls_client_cert": str(certificate.certificate), key: path}
    return {**trusted, key: path}


@pytest.mark.parametrize("key", KEYS)
def test_whatever_is_wrong_with_a_file_looks_the_same_and_holds_nobody_up(
    site: Site, receiver: Receiver, certificate: Certificate, files: dict[str, str], key: str
) -> None:
    with Receiver(certificate=certificate) as secure:
        for name, path in files.items():
            site.http(name, secure.url, ONCE, timeout=5, **config_with(key, path, secure.url, certificate))
            site.send(name)
        site.http("healthy", receiver.url)
        worker = site.start()

        healthy = site.send("healthy")
        site.wait_for_status(healthy, "completed")
        site.wait_until_settled()

        errors = dict(site.db.execute("select endpoint_name, last_error from ulak.dlq").fetchall())
        assert errors == dict.fromkeys(files, FILE_PROBLEM)
        assert secure.requests == []
        assert not worker.call.is_done()


def test_a_file_that_is_replaced_counts_from_then_on(site: Site, certificate: Certificate, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.write_bytes(certificate.certificate.read_bytes())
    with Receiver(certificate=certificate) as secure:
        site.http("shop", secure.url, ONCE, tls_ca_bundle=str(bundle))
        worker = site.start()
        site.wait_for_status(site.send("shop"), "completed")

        bundle.unlink()
        os.mkfifo(bundle)
        error = site.wait_for_status(site.send("shop"), "failed")["last_error"]
        bundle.unlink()
        bundle.write_bytes(certificate.certificate.read_bytes())
        site.wait_for_status(site.send("shop"), "completed")

    assert error == FILE_PROBLEM
    assert not worker.call.is_done()


def test_ping_does_not_wait_for_a_file_either(site: Site, files: dict[str, str]) -> None:
    for name in ("fifo", "endless"):
        site.http(name, "https://127.0.0.1:9/", tls_ca_bundle=files[name])

        with site.connect("ulak_admin") as admin:
            row = admin.execute("select outcome, error from ulak.ping(%s)", [name]).fetchone()

        assert row == ("failed", FILE_PROBLEM)


SECRETS = {
    "header": "hush-header-value",
    "url": "http://hush-host.example.com/hush-path?hush=1",
    "proxy": "http://hush-proxy.example.com:3128",
    "user": "hush-user",
    "password": "hush-password",
    "token": "hush-token",
    "signing": "hush-signing-secret",
    "type": "hush-type",
}


def test_curl_shows_no_secret_wherever_it_stands(site: Site) -> None:
    for name, value in SECRETS.items():
        site.call("set_secret", name, value)
    site.http(
        "shop",
        {"$secret": "url"},  # type: ignore[arg-type]
        headers={"x-team": {"$secret": "header"}, "x-plain": "shown"},
        proxy={
            "url": {"$secret": "proxy"},
            "username": {"$secret": "user"},
            "password": {"$secret": "password"},
        },
        auth={"type": "bearer", "token": {"$secret": "token"}},
        signing_secret={"$secret": "signing"},
    )
    id = site.send("shop", {"price": 5})

    with site.connect("ulak_admin") as admin:
        row = admin.execute("select ulak.curl(%s)", [id]).fetchone()

    assert row is not None
    words = shlex.split(row[0])
    assert "hush" not in row[0]
    assert "x-plain: shown" in words
    assert '{"price": 5}' in words
    assert re.search(r"authorization: Bearer \*\*\*\*", row[0])


def test_a_captured_answer_and_a_ping_show_no_secret_that_was_echoed(site: Site, echo: Receiver) -> None:
    site.configure(capture_response="true")
    site.call("set_secret", "token", "hush-token-1")
    site.call("set_secret", "key", "hush/key+2")
    site.http(
        "shop",
        echo.url,
        ONCE,
        auth={"type": "bearer", "token": {"$secret": "token"}},
        headers={"x-own": {"$secret": "key"}},
        signing_secret="hush-signing-3",
    )
    id = site.send("shop")
    site.start()
    site.wait_for_status(id, "failed")

    with site.connect("ulak_admin") as admin:
        (response,) = admin.execute("select response from ulak.queue where id = %s", [id]).fetchone() or [None]
        ping = admin.execute("select error, response from ulak.ping('shop')").fetchone()

    request = echo.requests[0]
    told = f"{response} {ping}"
    assert "x-echo" in response["headers"]
    assert "hush" not in told
    assert request.headers["webhook-signature"].partition(",")[2] not in told


def test_a_config_that_cannot_be_read_costs_no_other_endpoint_its_deliveries(
    site_in: Callable[[str], Site], receiver: Receiver
) -> None:
    site = site_in("SQL_ASCII")
    for name in ("broken", "healthy"):
        site.http(name, receiver.url, ONCE)
    site.db.execute("""
        update ulak.endpoints
        set config = config || jsonb_build_object('headers', jsonb_build_object('x-own', convert_from('\\xff', 'SQL_ASCII')))
        where name = 'broken'
    """)
    broken, healthy = site.send("broken"), site.send("healthy")

    worker = site.start()

    site.wait_for_status(healthy, "completed")
    assert (
        site.wait_for_status(broken, "failed")["last_error"]
        == "[RETRYABLE] config: it can't be read: it isn't valid UTF-8"
    )
    assert not worker.call.is_done()
