"""Endpoints of protocol redis: a worker adds their messages to streams of a real redis-server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.receiver import Certificate, shown_by_client
from support.redis import Redis
from support.site import PATIENT, UNBROKEN, Site


@pytest.fixture
def server(redis_server: Redis) -> Iterator[Redis]:
    yield redis_server
    redis_server.reset()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Redis]:
    """One that a test may kill."""
    with Redis(tmp_path / "redis") as server:
        yield server


def endpoint(site: Site, server: Redis, name: str = "shop", policy: Any = None, **config: Any) -> int:
    config = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders", **config}
    return site.endpoint(name, {"circuit_breaker": UNBROKEN, **config}, policy or PATIENT, "redis")


def test_a_message_is_an_entry_of_the_stream(site: Site, server: Redis) -> None:
    endpoint(site, server)
    site.start()

    id = site.send("shop", {"order": 7, "note": "caf\u00e9"})

    message = site.wait_for_status(id, "completed")
    (entry,) = server.entries("orders")
    assert json.loads(entry.pop("payload")) == {"order": 7, "note": "caf\u00e9"}
    assert entry.pop("created_at").startswith(str(message["created_at"].year))
    assert entry == {"message_id": str(message["message_id"]), "attempt": "1"}


def test_what_else_a_message_has_travels_in_fields(site: Site, server: Redis) -> None:
    endpoint(site, server)
    site.start()

    id = site.send(
        "shop",
        correlation_id="0190a5d2-5b9e-7000-8000-000000000001",
        ordering_key="customer 7",
        headers={"x-tenant": "acme", "Content-Type": "application/vnd.order+json"},
        generation=7,
    )

    site.wait_for_status(id, "completed")
    (entry,) = server.entries("orders")
    assert entry["correlation_id"] == "0190a5d2-5b9e-7000-8000-000000000001"
    assert entry["ordering_key"] == "customer 7"
    assert entry["content_type"] == "application/vnd.order+json"
    assert json.loads(entry["headers"]) == {"x-tenant": "acme", "ulak-generation": "7"}


def test_the_stream_may_be_named_by_the_message(site: Site, server: Redis) -> None:
    endpoint(site, server, stream_key="orders.{event_type}")
    site.start()

    paid = site.send("shop", metadata={"event_type": "paid"})
    unnamed = site.send("shop")

    site.wait_for_status(paid, "completed")
    site.wait_for_status(unnamed, "failed")
    assert len(server.entries("orders.paid")) == 1
    assert "has no event_type" in site.dead(unnamed)["last_error"]


def test_many_messages_are_each_added_once(site: Site, server: Redis) -> None:
    endpoint(site, server)
    ids = site.send_many(1000)

    site.start()
    site.wait_until_settled()

    entries = server.entries("orders")
    assert sorted(json.loads(entry["payload"])["n"] for entry in entries) == list(range(1, 1001))
    assert {site.status(id) for id in ids[::100]} == {"completed"}


def test_the_order_of_a_key_is_kept(site: Site, server: Redis) -> None:
    endpoint(site, server)
    for n in range(30):
        site.send("shop", {"n": n}, ordering_key=f"key {n % 3}")

    site.start()
    site.wait_until_settled()

    entries = server.entries("orders")
    for key in range(3):
        order = [json.loads(each["payload"])["n"] for each in entries if each["ordering_key"] == f"key {key}"]
        assert order == list(range(key, 30, 3))


def test_what_is_no_stream_refuses_for_good_and_its_neighbours_arrive(site: Site, server: Redis) -> None:
    endpoint(site, server, stream_key="{kind}")
    with server.client() as client:
        client.set("text", "no stream")
    ids = [site.send("shop", metadata={"kind": kind}) for kind in ("stream", "text", "stream")]

    site.start()
    site.wait_until_settled()

    assert [site.status(id) for id in ids] == ["completed", "failed", "completed"]
    assert site.dead(ids[1])["last_error"].startswith(f"[PERMANENT] redis: 127.0.0.1:{server.port}: WRONGTYPE")


def test_a_full_server_is_tried_again(site: Site, server: Redis) -> None:
    endpoint(site, server)
    server.config(maxmemory="1")
    site.start()

    id = site.send()
    told = site.wait_for_error(id, "OOM")
    server.config(maxmemory="0")

    site.wait_for_status(id, "completed")
    assert told.startswith("[RETRYABLE]")
    assert len(server.entries("orders")) == 1


def test_a_replica_is_tried_again(site: Site, own: Redis) -> None:
    endpoint(site, own)
    site.start()
    with own.client() as client:
        client.slaveof("127.0.0.1", 1)
        id = site.send()
        site.wait_for_error(id, "READONLY")
        client.slaveof()

    site.wait_for_status(id, "completed")


def test_a_stream_that_must_exist_is_waited_for(site: Site, server: Redis) -> None:
    endpoint(site, server, nomkstream=True)
    site.start()

    id = site.send()
    site.wait_for_error(id, "no such stream")
    with server.client() as client:
        client.xadd("orders", {"made": "by a consumer"})

    site.wait_for_status(id, "completed")


def test_a_stream_is_trimmed(site: Site, server: Redis) -> None:
    last = "99999999999999-0"
    trims: dict[str, tuple[dict[str, Any], range]] = {
        "exactly": ({"maxlen": 10, "maxlen_approximate": False}, range(10, 11)),
        # To whole nodes, of 100 entries.
        "about": ({"maxlen": 10}, range(11, 111)),
        "exactly-from": ({"minid": last, "maxlen_approximate": False}, range(1)),
        "about-from": ({"minid": last}, range(101)),
    }
    for name, (trim, _) in trims.items():
        endpoint(site, server, name, stream_key=name, **trim)
        site.send_many(300, name)

    site.start()
    site.wait_until_settled()

    for name, (_, wanted) in trims.items():
        assert len(server.entries(name)) in wanted, name


def test_a_server_that_is_down_gets_its_messages_later(site: Site, own: Redis) -> None:
    endpoint(site, own)
    own.kill()
    site.start()

    ids = site.send_many(20)
    told = site.wait_for_error(ids[0], "connect: Connection refused")
    own.start()

    site.wait_until_settled()
    assert told == f"[RETRYABLE] connect: Connection refused (127.0.0.1:{own.port})"
    assert len(own.entries("orders")) == 20


def test_a_server_that_was_restarted_costs_an_idle_connection_and_no_attempt(site: Site, own: Redis) -> None:
    endpoint(site, own)
    site.start()
    site.wait_for_status(site.send(), "completed")

    own.restart()
    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1
    assert len(own.entries("orders")) == 2


def test_a_connection_that_the_server_closes_costs_no_attempt(site: Site, server: Redis) -> None:
    endpoint(site, server)
    site.start()
    site.wait_for_status(site.send(), "completed")
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)

    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1


def test_a_kept_connection_is_used_again(site: Site, server: Redis) -> None:
    endpoint(site, server)
    site.start()
    with server.client() as client:
        site.wait_for_status(site.send(), "completed")
        before = client.info("stats")["total_connections_received"]
        for _ in range(5):
            site.wait_for_status(site.send(), "completed")

        assert client.info("stats")["total_connections_received"] == before


def test_credentials_and_database_are_those_of_the_config(site: Site, own: Redis) -> None:
    with own.client() as client:
        client.acl_setuser(
            "ulak", enabled=True, passwords=["+hunter2-hunter2"], keys=["orders"], commands=["+xadd", "+select"]
        )
    site.call("set_secret", "redis-password", "hunter2-hunter2")
    endpoint(site, own, username="ulak", password={"$secret": "redis-password"}, db=3)
    site.start()

    site.wait_for_status(site.send(), "completed")

    with own.client() as client:
        client.select(3)
        assert client.xlen("orders") == 1


def test_refused_credentials_are_tried_again_and_not_shown(site: Site, own: Redis) -> None:
    own.config(requirepass="right-password")
    own.password = "right-password"
    endpoint(site, own, password="wrong-password")
    endpoint(site, own, "anonymous")
    site.start()

    told = site.wait_for_error(site.send("shop"), "WRONGPASS")
    id = site.send("anonymous")
    unknown = site.wait_for_error(id, "NOAUTH")
    own.config(requirepass="")

    assert told.startswith("[RETRYABLE]")
    assert unknown.startswith("[RETRYABLE]")
    assert "wrong-password" not in told
    site.wait_for_status(id, "completed")


def test_tls_is_verified_on_both_sides(site: Site, tmp_path: Path, certificate: Certificate) -> None:
    with Redis(tmp_path / "redis", certificate=certificate) as server:
        authority, shown = {"tls_ca_cert": str(certificate.certificate)}, shown_by_client(certificate)
        endpoint(site, server, "trusted", tls=True, **authority, **shown)
        endpoint(site, server, "untrusted", tls=True, **shown)
        endpoint(site, server, "nameless", tls=True, **authority)
        site.start()

        site.wait_for_status(site.send("trusted"), "completed")
        untrusted = site.wait_for_error(site.send("untrusted"), "tls:")
        nameless = site.wait_for_error(site.send("nameless"), "tls:")

        assert untrusted == f"[RETRYABLE] tls: self-signed certificate (127.0.0.1:{server.port})"
        assert nameless == f"[RETRYABLE] tls: 127.0.0.1:{server.port}: tlsv13 alert certificate required"
        assert len(server.entries("orders")) == 1


def test_an_address_that_policy_forbids_is_not_dialled(site: Site, server: Redis) -> None:
    site.configure(http_allowed_networks="10.0.0.0/8")
    endpoint(site, server)
    site.start()

    id = site.send()

    site.wait_for_status(id, "failed")
    assert site.dead(id)["last_error"].startswith("[PERMANENT] blocked: address 127.0.0.1 is blocked (loopback")
    assert server.entries("orders") == []


def test_a_host_that_has_no_address_is_tried_again(site: Site, server: Redis) -> None:
    endpoint(site, server, host="nowhere.invalid")
    site.start()

    told = site.wait_for_error(site.send(), "resolve: nowhere.invalid")

    assert told.startswith("[RETRYABLE]")


def test_a_ping_adds_an_entry_or_says_why_it_cannot(site: Site, own: Redis) -> None:
    endpoint(site, own)

    (well,) = site.rows("select * from ulak.ping('shop')")
    own.kill()
    (down,) = site.rows("select * from ulak.ping('shop')")

    assert (well["outcome"], well["error"]) == ("delivered", None)
    assert down["outcome"] == "failed"
    assert "connect: Connection refused" in down["error"]


def test_a_config_that_changes_is_used_by_the_next_message(site: Site, server: Redis) -> None:
    endpoint(site, server)
    site.start()
    site.wait_for_status(site.send(), "completed")

    config = {"host": "127.0.0.1", "port": server.port, "stream_key": "others"}
    site.call("alter_endpoint", "shop", config)
    site.wait_for_status(site.send(), "completed")

    assert len(server.entries("others")) == 1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"stream_key": None}, "stream_key"),
        ({"streamkey": "orders"}, 'Did you mean "stream_key"?'),
        ({"host": "redis://127.0.0.1"}, "must be the name or the address of a host"),
        ({"stream_key": "orders.{event type}"}, "has a brace that does not enclose a name"),
        ({"maxlen": 0}, "maxlen"),
        ({"maxlen": 10, "minid": "1-0"}, "has no effect beside maxlen"),
        ({"minid": "yesterday"}, "minid"),
        ({"maxlen_approximate": False}, "has no effect without maxlen or minid"),
        ({"username": "ulak"}, "is required beside username"),
        ({"tls_ca_cert": "/etc/ssl/ca.pem"}, 'has no effect without "tls": true'),
        ({"tls": True, "tls_key": "/etc/ssl/key.pem"}, "is required beside tls_key"),
    ],
)
def test_a_config_that_means_nothing_is_refused(site: Site, config: dict[str, Any], told: str) -> None:
    config = {"host": "127.0.0.1", "stream_key": "orders", **config}
    given = {key: value for key, value in config.items() if value is not None}

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="invalid config of redis endpoint") as raised:
        site.call("create_endpoint", "shop", "redis", given)

    assert told in f"{raised.value.diag.message_primary} {raised.value.diag.message_hint}"
