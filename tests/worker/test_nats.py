"""Endpoints of protocol nats: a worker publishes their messages to a real nats-server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.nats import Nats
from support.nkeys import User, operator_mode
from support.ports import closed_port, start_on_free_port
from support.receiver import Certificate, shown_by_client
from support.sessions import wait_until
from support.site import PATIENT, UNBROKEN, Site


@pytest.fixture
def server(nats: Nats) -> Iterator[Nats]:
    nats.create_stream("ORDERS", "orders", "orders.>")
    yield nats
    nats.delete_stream("ORDERS")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Nats]:
    """One that a test may kill."""
    with Nats(tmp_path / "nats") as server:
        server.create_stream("ORDERS", "orders", "orders.>")
        yield server


def endpoint(site: Site, server: Nats, name: str = "shop", policy: Any = None, **config: Any) -> int:
    config = {"url": server.url, "subject": "orders", **config}
    return site.endpoint(name, {"circuit_breaker": UNBROKEN, **config}, policy or PATIENT, "nats")


def numbers(server: Nats) -> list[int]:
    return [json.loads(each.payload)["n"] for each in server.stored("ORDERS")]


def test_a_message_is_in_the_stream_with_its_id(site: Site, server: Nats) -> None:
    endpoint(site, server, stream="ORDERS")
    site.start()

    id = site.send("shop", {"order": 7, "note": "caf\u00e9"})

    message = site.wait_for_status(id, "completed")
    (found,) = server.stored("ORDERS")
    assert found.subject == "orders"
    assert json.loads(found.payload) == {"order": 7, "note": "caf\u00e9"}
    assert found.headers.pop("ulak-created-at").startswith(str(message["created_at"].year))
    assert found.headers == {
        "Nats-Msg-Id": str(message["message_id"]),
        "Nats-Expected-Stream": "ORDERS",
        "ulak-message-id": str(message["message_id"]),
        "ulak-attempt": "1",
        "content-type": "application/json",
    }


def test_headers_are_those_of_the_message_and_of_the_config(site: Site, server: Nats) -> None:
    endpoint(site, server, headers={"source": "shop", "x-tenant": "nobody"})
    site.start()

    id = site.send(
        "shop",
        correlation_id="0190a5d2-5b9e-7000-8000-000000000001",
        headers={"x-tenant": "caf\u00e9", "Content-Type": "application/vnd.order+json"},
        generation=7,
    )

    site.wait_for_status(id, "completed")
    (found,) = server.stored("ORDERS")
    assert found.headers["source"] == "shop"
    assert found.headers["x-tenant"] == "caf\u00e9"
    assert found.headers["content-type"] == "application/vnd.order+json"
    assert found.headers["ulak-correlation-id"] == "0190a5d2-5b9e-7000-8000-000000000001"
    assert found.headers["ulak-generation"] == "7"


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_a_message_may_be_an_event(site: Site, server: Nats, mode: str) -> None:
    endpoint(site, server, cloudevents=True, cloudevents_mode=mode, cloudevents_source="/caf\u00e9")
    site.start()

    message = site.wait_for_status(site.send("shop", {"n": 1}, metadata={"event_type": "order.paid"}), "completed")

    (found,) = server.stored("ORDERS")
    if mode == "binary":
        assert json.loads(found.payload) == {"n": 1}
        assert found.headers["ce-specversion"] == "1.0"
        assert found.headers["ce-id"] == str(message["message_id"])
        assert found.headers["ce-type"] == "order.paid"
        assert found.headers["ce-source"] == "/caf%C3%A9"
        assert found.headers["ce-datacontenttype"] == "application/json"
    else:
        event = json.loads(found.payload)
        assert (event["type"], event["source"], event["data"]) == ("order.paid", "/caf\u00e9", {"n": 1})
        assert found.headers["content-type"] == "application/cloudevents+json"


def test_the_subject_may_be_named_by_the_message(site: Site, server: Nats) -> None:
    endpoint(site, server, subject="orders.{event_type}")
    site.start()

    paid = site.send("shop", metadata={"event_type": "order.paid"})
    unnamed = site.send("shop")

    site.wait_for_status(paid, "completed")
    site.wait_for_status(unnamed, "failed")
    assert [each.subject for each in server.stored("ORDERS")] == ["orders.order.paid"]
    assert "has no event_type" in site.dead(unnamed)["last_error"]


def test_many_messages_are_each_published_once(site: Site, server: Nats) -> None:
    endpoint(site, server)
    ids = site.send_many(1000)

    site.start()
    site.wait_until_settled()

    assert sorted(numbers(server)) == list(range(1, 1001))
    assert {site.status(id) for id in ids[::100]} == {"completed"}


def test_the_order_of_a_key_is_kept(site: Site, server: Nats) -> None:
    endpoint(site, server)
    for n in range(30):
        site.send("shop", {"n": n, "key": n % 3}, ordering_key=f"key {n % 3}")

    site.start()
    site.wait_until_settled()

    found = [json.loads(each.payload) for each in server.stored("ORDERS")]
    for key in range(3):
        assert [each["n"] for each in found if each["key"] == key] == list(range(key, 30, 3))


def test_what_comes_again_is_dropped_by_the_stream_and_counts_as_delivered(site: Site, server: Nats) -> None:
    endpoint(site, server)
    site.start()
    first = site.wait_for_status(site.send(), "completed")

    site.wait_for_status(site.call("replay_message", first["id"]), "completed")

    assert len(server.stored("ORDERS")) == 1


def test_a_subject_that_no_stream_takes_is_tried_again(site: Site, nats: Nats) -> None:
    endpoint(site, nats, subject="nobody.listens")
    site.start()

    id = site.send()
    told = site.wait_for_error(id, "unroutable")
    nats.create_stream("LATE", "nobody.>")

    site.wait_for_status(id, "completed")
    nats.delete_stream("LATE")
    assert told == f"[RETRYABLE] unroutable: 127.0.0.1:{nats.port}: no stream takes subject nobody.listens"


def test_a_server_without_jetstream_says_so(site: Site, tmp_path: Path) -> None:
    with Nats(tmp_path / "nats", jetstream=False) as server:
        endpoint(site, server)
        site.start()

        told = site.wait_for_error(site.send(), "unroutable")

        assert told.endswith("no stream takes subject orders (the server has no JetStream)")


def test_another_stream_than_the_expected_one_is_not_written_to(site: Site, server: Nats) -> None:
    endpoint(site, server, stream="INVOICES")
    site.start()

    told = site.wait_for_error(site.send(), "refused")

    assert told == f"[RETRYABLE] refused: 127.0.0.1:{server.port}: expected stream does not match (10060)"
    assert server.stored("ORDERS") == []


def test_a_full_stream_is_tried_again(site: Site, nats: Nats) -> None:
    nats.create_stream("SMALL", "small", max_msgs=1, discard="new")
    endpoint(site, nats, subject="small")
    site.start()
    site.wait_for_status(site.send(), "completed")

    id = site.send()
    told = site.wait_for_error(id, "refused")
    nats.update_stream("SMALL", "small", max_msgs=2, discard="new")

    site.wait_for_status(id, "completed")
    nats.delete_stream("SMALL")
    assert told == f"[RETRYABLE] refused: 127.0.0.1:{nats.port}: maximum messages exceeded (10077)"


def test_what_is_too_large_is_dead_and_its_neighbours_arrive(site: Site, tmp_path: Path) -> None:
    with Nats(tmp_path / "nats", "max_payload: 4096") as server:
        server.create_stream("ORDERS", "orders", max_msg_size=2048)
        endpoint(site, server)
        ids = [site.send("shop", {"n": n, "text": "x" * size}) for n, size in enumerate((1, 3000, 5000, 1))]

        site.start()
        site.wait_until_settled()

        assert [site.status(id) for id in ids] == ["completed", "failed", "failed", "completed"]
        place = f"127.0.0.1:{server.port}"
        assert (
            site.dead(ids[1])["last_error"]
            == f"[PERMANENT] refused: {place}: message size exceeds maximum allowed (10054)"
        )
        assert (
            site.dead(ids[2])["last_error"]
            == f"[PERMANENT] message: the message is larger than the 4096 bytes that {place} takes"
        )


def test_without_jetstream_subscribers_get_the_message_and_it_is_delivered_once_the_server_has_it(
    site: Site, nats: Nats
) -> None:
    endpoint(site, nats, subject="news.{event_type}", jetstream=False)
    with nats.client() as subscriber:
        subscriber.subscribe("news.>")
        site.start()
        ids = [site.send("shop", {"n": n}, metadata={"event_type": "paid"}) for n in range(200)]

        site.wait_until_settled()

        found = [subscriber.take() for _ in range(200)]
    assert {site.status(id) for id in ids} == {"completed"}
    assert sorted(json.loads(each.payload)["n"] for each in found) == list(range(200))
    assert {each.subject for each in found} == {"news.paid"}
    assert len({each.headers["ulak-message-id"] for each in found}) == 200


def test_a_server_that_is_down_gets_its_messages_later(site: Site, own: Nats) -> None:
    endpoint(site, own)
    own.kill()
    site.start()

    ids = site.send_many(20)
    told = site.wait_for_error(ids[0], "connect: Connection refused")
    own.start()

    site.wait_until_settled()
    assert told == f"[RETRYABLE] connect: Connection refused (127.0.0.1:{own.port})"
    assert sorted(numbers(own)) == list(range(1, 21))


def test_a_server_that_was_restarted_costs_an_idle_connection_and_no_attempt(site: Site, own: Nats) -> None:
    endpoint(site, own)
    site.start()
    site.wait_for_status(site.send(), "completed")

    own.restart()
    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1
    assert len(own.stored("ORDERS")) == 2


def test_a_kept_connection_is_used_again(site: Site, server: Nats) -> None:
    endpoint(site, server)
    site.start()
    site.wait_for_status(site.send(), "completed")
    before = server.connections()

    for _ in range(5):
        site.wait_for_status(site.send(), "completed")

    assert server.connections() == before + 1


# Several servers.


def test_of_several_servers_one_that_is_up_gets_the_messages(site: Site, server: Nats) -> None:
    endpoint(site, server, url=f"nats://127.0.0.1:{closed_port()},127.0.0.1:{server.port}")
    site.start()

    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1


def test_a_server_that_hangs_is_left_for_the_next_one(site: Site, own: Nats, server: Nats) -> None:
    own.stop()
    endpoint(site, server, url=[own.url, server.url])
    site.start()

    message = site.wait_for_status(site.send(), "completed")

    own.go_on()
    assert message["attempts"] == 1
    assert len(server.stored("ORDERS")) == 1


def clustered(folder: Path, route: int, other: int, advertised: str | None = None) -> Nats:
    lines = [f'cluster: {{name: "c", listen: "127.0.0.1:{route}", routes: ["nats-route://127.0.0.1:{other}"]}}']
    if advertised is not None:
        lines.append(f'client_advertise: "{advertised}"')
    return Nats(folder, *lines, jetstream=False)


@contextmanager
def two_of_a_cluster(folder: Path, advertised: str | None = None) -> Iterator[tuple[Nats, Nats]]:
    """The first tells its clients of the second, by the address that this one advertises."""
    with ExitStack() as stack:

        def start(route: int, other: int) -> tuple[Nats, Nats]:
            first = stack.enter_context(clustered(folder / f"a-{route}", route, other))
            return first, stack.enter_context(clustered(folder / f"b-{route}", other, route, advertised))

        first, second = start_on_free_port(start, 2)
        wait_until(
            lambda: is_advertised(first, advertised or f"127.0.0.1:{second.port}"), "the second server's address"
        )
        yield first, second


def is_advertised(server: Nats, place: str) -> bool:
    with server.client() as client:
        return place in client.info.get("connect_urls", ())


def test_a_server_that_the_cluster_advertises_takes_over(site: Site, tmp_path: Path) -> None:
    with two_of_a_cluster(tmp_path) as (first, second):
        endpoint(site, first, jetstream=False)
        site.start()
        site.wait_for_status(site.send(), "completed")

        first.kill()
        with second.client() as subscriber:
            subscriber.subscribe("orders")
            message = site.wait_for_status(site.send("shop", {"n": 2}), "completed")
            taken = subscriber.take()

    assert message["attempts"] == 1
    assert json.loads(taken.payload) == {"n": 2}


def test_an_advertised_address_that_policy_forbids_is_not_dialled(site: Site, tmp_path: Path) -> None:
    with two_of_a_cluster(tmp_path, "169.254.169.254:4222") as (first, second):
        endpoint(site, first, jetstream=False)
        site.start()
        site.wait_for_status(site.send(), "completed")

        first.kill()
        second.kill()
        told = site.wait_for_error(site.send(), "connect")

    # The server that was named may come back; the other one isn't mentioned, and took no time.
    assert told == f"[RETRYABLE] connect: Connection refused (127.0.0.1:{first.port})"


def test_an_advertised_host_that_is_not_allowed_is_not_dialled(site: Site, tmp_path: Path) -> None:
    with two_of_a_cluster(tmp_path) as (first, _):
        site.configure(http_allowed_hosts="localhost")
        endpoint(site, first, url=f"localhost:{first.port}", jetstream=False)
        site.start()
        site.wait_for_status(site.send(), "completed")

        first.kill()
        told = site.wait_for_error(site.send(), "connect")

    assert told == f"[RETRYABLE] connect: Connection refused (localhost:{first.port})"


def test_an_advertised_host_gets_no_secret_that_is_bound_to_others(site: Site, tmp_path: Path) -> None:
    with two_of_a_cluster(tmp_path) as (first, _):
        site.db.execute("select ulak.set_secret('nats', 'hush-hush', p_hosts => '{localhost}')")
        endpoint(site, first, url=f"localhost:{first.port}", jetstream=False, headers={"x-key": {"$secret": "nats"}})
        site.start()
        site.wait_for_status(site.send(), "completed")

        first.kill()
        told = site.wait_for_error(site.send(), "connect")

    assert told == f"[RETRYABLE] connect: Connection refused (localhost:{first.port})"


def test_an_address_that_policy_forbids_is_not_dialled(site: Site, server: Nats) -> None:
    site.configure(http_allowed_networks="10.0.0.0/8")
    endpoint(site, server)
    site.start()

    id = site.send()

    site.wait_for_status(id, "failed")
    assert site.dead(id)["last_error"].startswith("[PERMANENT] blocked: address 127.0.0.1 is blocked (loopback")
    assert server.stored("ORDERS") == []


# Credentials.


def test_a_token_lets_in_and_a_wrong_one_is_not_shown(site: Site, tmp_path: Path) -> None:
    with Nats(
        tmp_path / "nats", 'authorization: {token: "right-token"}', login={"auth_token": "right-token"}
    ) as server:
        server.create_stream("ORDERS", "orders")
        site.call("set_secret", "nats-token", "right-token")
        endpoint(site, server, token={"$secret": "nats-token"})
        endpoint(site, server, "wrong", token="wrong-token")
        endpoint(site, server, "anonymous")
        site.start()

        site.wait_for_status(site.send("shop"), "completed")
        told = site.wait_for_error(site.send("wrong"), "login")
        unknown = site.wait_for_error(site.send("anonymous"), "login")

    assert told == unknown == f"[RETRYABLE] login: 127.0.0.1:{server.port}: Authorization Violation"


PERMISSIONS = """
authorization: {users: [
    {user: "admin", password: "admin"},
    {user: "ulak", password: "hunter2-hunter2", permissions: {publish: ["orders"], subscribe: ["_INBOX.>"]}}
    {user: "deaf", password: "hunter2-hunter2", permissions: {publish: ["orders"], subscribe: {deny: [">"]}}}
]}
"""


@pytest.mark.parametrize("jetstream", [True, False])
def test_what_a_user_may_not_publish_is_tried_again_and_the_rest_arrives(
    site: Site, tmp_path: Path, jetstream: bool
) -> None:
    with Nats(tmp_path / "nats", PERMISSIONS, login={"user": "admin", "pass": "admin"}) as server:
        server.create_stream("ORDERS", "orders", "secrets")
        endpoint(site, server, subject="{place}", username="ulak", password="hunter2-hunter2", jetstream=jetstream)
        allowed, forbidden, too = (
            site.send("shop", metadata={"place": each}) for each in ("orders", "secrets", "orders")
        )

        site.start()
        told = site.wait_for_error(forbidden, "login")
        site.wait_for_status(allowed, "completed")
        site.wait_for_status(too, "completed")

        assert told == f"[RETRYABLE] login: 127.0.0.1:{server.port}: Permissions Violation for Publish to secrets"
        assert [each.subject for each in server.stored("ORDERS")] == ["orders", "orders"]


def test_a_user_that_may_not_receive_acknowledgements_is_reported(site: Site, tmp_path: Path) -> None:
    with Nats(tmp_path / "nats", PERMISSIONS, login={"user": "admin", "pass": "admin"}) as server:
        server.create_stream("ORDERS", "orders")
        endpoint(site, server, username="deaf", password="hunter2-hunter2")
        site.start()

        told = site.wait_for_error(site.send(), "login")

        assert told == f"[RETRYABLE] login: 127.0.0.1:{server.port}: Permissions Violation for Subscription to"


def test_an_nkey_signs_the_nonce_of_the_server(site: Site, tmp_path: Path) -> None:
    user, stranger = User.create(), User.create()
    with Nats(tmp_path / "nats", f'authorization: {{users: [{{nkey: "{user.public}"}}]}}', jetstream=False) as server:
        site.call("set_secret", "seed", user.seed)
        endpoint(site, server, nkey_seed={"$secret": "seed"}, jetstream=False)
        endpoint(site, server, "stranger", nkey_seed=stranger.seed, jetstream=False)
        site.start()

        site.wait_for_status(site.send("shop"), "completed")
        told = site.wait_for_error(site.send("stranger"), "login")

    assert told == f"[RETRYABLE] login: 127.0.0.1:{server.port}: Authorization Violation"


def test_a_file_of_credentials_is_read_anew_for_each_connection(site: Site, tmp_path: Path) -> None:
    lines, credentials = operator_mode()
    with Nats(tmp_path / "nats", *lines, jetstream=False) as server:
        file = tmp_path / "user.creds"
        file.write_text(credentials.replace("eyJ", "eyK"))
        file.chmod(0o644)
        endpoint(site, server, credentials_file=str(file), jetstream=False)
        endpoint(site, server, "missing", credentials_file="/nowhere/user.creds", jetstream=False)
        site.start()
        id = site.send("shop")
        refused = site.wait_for_error(id, "login")
        missing = site.wait_for_error(site.send("missing"), "config")

        file.write_text(credentials)

        site.wait_for_status(id, "completed")
    assert refused == f"[RETRYABLE] login: 127.0.0.1:{server.port}: Authorization Violation"
    assert missing.startswith("[RETRYABLE] config: a file that the config names can't be used")


def test_tls_is_verified_on_both_sides(site: Site, tmp_path: Path, certificate: Certificate) -> None:
    with Nats(tmp_path / "nats", certificate=certificate) as server:
        server.create_stream("ORDERS", "orders")
        authority, shown = {"tls_ca_cert": str(certificate.certificate)}, shown_by_client(certificate)
        endpoint(site, server, "trusted", tls=True, **authority, **shown)
        endpoint(site, server, "untrusted", tls=True, **shown)
        endpoint(site, server, "nameless", tls=True, **authority)
        endpoint(site, server, "clear")
        site.start()

        site.wait_for_status(site.send("trusted"), "completed")
        untrusted = site.wait_for_error(site.send("untrusted"), "tls:")
        nameless = site.wait_for_error(site.send("nameless"), "tls:")
        clear = site.wait_for_error(site.send("clear"), "tls:")

        place = f"127.0.0.1:{server.port}"
        assert untrusted == f"[RETRYABLE] tls: self-signed certificate ({place})"
        # The alert it sends depends on the version of Go.
        assert nameless.startswith(f"[RETRYABLE] tls: {place}: ")
        assert nameless.endswith(("alert bad certificate", "alert certificate required"))
        assert clear == f'[RETRYABLE] tls: {place} asks for it: the config needs "tls": true'
        assert len(server.stored("ORDERS")) == 1


def test_a_ping_is_published_or_says_why_it_cannot(site: Site, own: Nats) -> None:
    endpoint(site, own)

    (well,) = site.rows("select * from ulak.ping('shop')")
    own.kill()
    (down,) = site.rows("select * from ulak.ping('shop')")

    assert (well["outcome"], well["error"]) == ("delivered", None)
    assert down["outcome"] == "failed"
    assert "connect: Connection refused" in down["error"]


def test_a_config_that_changes_is_used_by_the_next_message(site: Site, server: Nats) -> None:
    endpoint(site, server)
    site.start()
    site.wait_for_status(site.send(), "completed")

    site.call("alter_endpoint", "shop", {"url": server.url, "subject": "orders.others"})
    site.wait_for_status(site.send(), "completed")

    assert [each.subject for each in server.stored("ORDERS")] == ["orders", "orders.others"]


SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"subject": None}, "subject"),
        ({"subjekt": "orders"}, 'Did you mean "subject"?'),
        ({"url": "http://127.0.0.1"}, "must be nats://host:port"),
        ({"url": "nats://127.0.0.1:70000"}, "must be nats://host:port"),
        ({"url": "nats://127.0.0.1:4222,"}, "must be nats://host:port"),
        ({"url": "nats://ulak:hunter2@127.0.0.1"}, "must not have credentials"),
        ({"subject": "orders.>"}, "must not have spaces, wildcards"),
        ({"subject": "orders.*.paid"}, "must not have spaces, wildcards"),
        ({"subject": "orders paid"}, "must not have spaces, wildcards"),
        ({"subject": "orders..paid"}, "empty tokens"),
        ({"subject": "orders."}, "empty tokens"),
        ({"subject": "$JS.API.STREAM.PURGE.ORDERS"}, "must not be one of the server's own"),
        ({"subject": "orders.{event type}"}, "has a brace that does not enclose a name"),
        ({"stream": "a.b"}, "stream"),
        ({"stream": "A", "jetstream": False}, 'has no effect with "jetstream": false'),
        ({"jetstream": "yes"}, "jetstream"),
        ({"username": "ulak"}, "is required beside username"),
        ({"password": "hunter2"}, "is required beside password"),
        ({"token": "abc", "nkey_seed": SEED}, "must not stand beside nkey_seed"),
        ({"nkey_seed": "SOABC"}, "nkey_seed"),
        ({"credentials_file": "user.creds"}, "credentials_file"),
        ({"credentials_file": "/etc/passwd"}, "credentials_file"),
        ({"credentials_file": "/etc/../user.creds"}, 'must not have ".."'),
        ({"headers": {"Nats-Rollup": "all"}}, "is a header that ulak sets itself"),
        ({"options": {"ping_interval": "soon"}}, "ping_interval"),
        ({"options": {"verbose": "1"}}, "verbose"),
        ({"tls_ca_cert": "/etc/ssl/ca.pem"}, 'has no effect without "tls": true'),
    ],
)
def test_a_config_that_means_nothing_is_refused(site: Site, config: dict[str, Any], told: str) -> None:
    config = {"url": "nats://127.0.0.1:4222", "subject": "orders", **config}
    given = {key: value for key, value in config.items() if value is not None}

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="invalid config of nats endpoint") as raised:
        site.call("create_endpoint", "shop", "nats", given)

    assert told in f"{raised.value.diag.message_primary} {raised.value.diag.message_hint}"


@pytest.mark.parametrize(
    "config",
    [
        {"url": "n1"},
        {"url": "tls://[::1]:4222", "tls": True},
        {"url": "nats://n1:4222, nats://n2:4222"},
        {"url": ["n1", "nats://n2:4222/"]},
        {"subject": "$KV.config.{name}"},
        {"nkey_seed": SEED},
        {"credentials_file": "/etc/nats/user.creds"},
        {
            "options": {
                "max_reconnect": "-1",
                "reconnect_wait": "2000",
                "ping_interval": "120000",
                "max_pings_out": "2",
                "io_buf_size": "32768",
            }
        },
    ],
)
def test_a_config_that_means_something_is_taken(site: Site, config: dict[str, Any]) -> None:
    given = {"url": "nats://127.0.0.1:4222", "subject": "orders", **config}

    assert site.call("validate_endpoint_config", "nats", given) is True
