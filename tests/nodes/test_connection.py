"""How a node reaches its database: by which way, as which role, and again after it was lost."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import PROJECT, Cluster
from support.node import Node, node_dsn, wait_for_nodes
from support.receiver import Receiver, make_certificate
from support.sessions import patience, wait_until
from support.site import Site

GUIDE = (PROJECT / "sql" / "GUIDE.md").read_text()
SECRET = "a password that is in no command line"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A server of its own, with TLS and passwords for connections over the network: it is restarted."""
    folder = tmp_path_factory.mktemp("server")
    certificate = make_certificate(folder)
    certificate.key.chmod(0o600)
    cluster = Cluster.create(in_memory=True)
    cluster.configure(
        {
            "listen_addresses": "127.0.0.1",
            "ssl": True,
            "ssl_cert_file": str(certificate.certificate),
            "ssl_key_file": str(certificate.key),
        }
    )
    (cluster.data / "pg_hba.conf").write_text(
        "hostssl all +ulak_node 127.0.0.1/32 scram-sha-256\nlocal all all trust\n"
    )
    cluster.restart()
    cluster.create_database("shop")
    cluster.install("shop")
    cluster.execute(f"alter role test_ulak_node password '{SECRET}'")
    (folder / "passwords").write_text(f"*:*:shop:test_ulak_node:{SECRET}\n")
    (folder / "passwords").chmod(0o600)
    yield cluster
    cluster.remove()


@pytest.fixture
def away(server: Cluster) -> Iterator[Site]:
    site = Site(server, "shop")
    yield site
    site.db.close()
    fresh = Site(server, "shop")
    fresh.close()


def test_a_node_comes_over_tls_with_a_password_from_a_file(away: Site, receiver: Receiver, folder: Path) -> None:
    away.http("shop", receiver.url)
    dsn = f"host=localhost hostaddr=127.0.0.1 port={away.cluster.port} dbname=shop user=test_ulak_node sslmode=verify-full"
    environment = {"PGPASSFILE": str(folder / "passwords"), "PGSSLROOTCERT": str(folder / "server.crt")}

    with Node(dsn, environment=environment) as node:
        node.wait_until_says("delivering as")
        (row,) = wait_for_nodes(away, 1)
        away.wait_for_status(away.send("shop"), "completed")

        assert away.value("select ssl from pg_stat_ssl where pid = %s", row["pid"])
        assert SECRET.encode() not in Path(f"/proc/{node.pid}/cmdline").read_bytes()


def test_a_node_logs_in_as_the_guide_says(away: Site, receiver: Receiver, folder: Path, tmp_path: Path) -> None:
    away.http("shop", receiver.url)
    (statement,) = re.findall(r"^create role node_1 .*;$", GUIDE, re.MULTILINE)
    away.db.execute(statement)
    (line,) = re.findall(r"^echo '(.*)' > ~/.pgpass && chmod 600 ~/.pgpass$", GUIDE, re.MULTILINE)
    (tmp_path / ".pgpass").write_text(line.replace("db1:5432:app", f"localhost:{away.cluster.port}:shop") + "\n")
    (tmp_path / ".pgpass").chmod(0o600)
    (dsn,) = re.findall(r'^python3 worker.py --dsn "(.*)"$', GUIDE, re.MULTILINE)
    here = f"host=localhost hostaddr=127.0.0.1 port={away.cluster.port} dbname=shop"
    dsn = dsn.replace("host=db1 dbname=app", here).replace("/etc/ssl/certs/ca.pem", str(folder / "server.crt"))

    with Node(dsn, environment={"HOME": str(tmp_path)}) as node:
        away.wait_for_status(away.send("shop"), "completed")

        assert node.says("delivering as node 1 on ")


@pytest.fixture
def folder(server: Cluster) -> Path:
    return Path(server.setting("ssl_cert_file")).parent


@pytest.mark.parametrize(
    "dsn",
    [
        "host=/nowhere password=secret",
        "postgresql://node:secret@nowhere/shop",
        "host=/nowhere sslpassword=secret",
    ],
)
def test_a_secret_on_the_command_line_is_refused(dsn: str) -> None:
    with Node(dsn) as node:
        assert node.wait() == 2
        assert "which everybody on this machine could read: use PGPASSFILE or PGPASSWORD" in node.lines()[0]
        assert not node.says("secret")


def test_an_invalid_dsn_is_refused() -> None:
    with Node("host") as node:
        assert node.wait() == 2
        assert node.says("--dsn can't be read")


def test_a_node_tries_again_and_does_not_say_why_each_time() -> None:
    """How soon, and how often it says so: unit/test_node.py."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        gone.settimeout(patience())
        dsn = f"host=127.0.0.1 port={gone.getsockname()[1]} dbname=shop sslmode=disable"
        with Node(dsn) as node:
            for _ in range(8):
                connection, _ = gone.accept()
                connection.close()

            # Six tries have failed: the first connection was only a look at the host.
            assert len(set(node.lines())) == 1
            assert len(node.lines()) < 6
            assert node.process.poll() is None


def test_a_node_gives_up_a_server_that_is_frozen_and_comes_back(away: Site, receiver: Receiver) -> None:
    """Its kernel accepts connections as before."""
    away.http("shop", receiver.url)
    with Node(node_dsn(away.cluster, "shop")) as node:
        node.wait_until_says("delivering as")
        away.cluster.freeze()
        try:
            node.wait_until_says("the server has been silent for 10 seconds")
            node.wait_until_says("timeout expired")
        finally:
            away.cluster.thaw()

        away.wait_for_status(away.send("shop"), "completed")


def test_a_login_outside_of_ulak_node_gets_no_code(site: Site) -> None:
    for user in ("nobody", "test_ulak_application", "test_ulak_monitor"):
        with Node(site.cluster.dsn(site.database, user)) as node:
            node.wait_until_says("the database has no code for a node")
            node.wait_until_says("permission denied")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_node_comes_back_when_the_server_was_restarted(away: Site, receiver: Receiver, mode: str) -> None:
    away.http("shop", receiver.url)
    with Node(node_dsn(away.cluster, "shop")) as node:
        node.wait_until_says("delivering as")
        (before,) = wait_for_nodes(away, 1)

        away.cluster.restart(mode)
        back = Site(away.cluster, "shop")
        wait_until(lambda: [row["pid"] for row in wait_for_nodes(back, 1)] != [before["pid"]], "the node's new session")
        back.wait_for_status(back.send("shop"), "completed")
        back.db.close()

        assert node.process.poll() is None


def test_of_several_hosts_a_node_takes_the_one_that_is_there(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    dsn = (
        f"host=/nowhere,{site.cluster.host} port=1,{site.cluster.port} dbname={site.database} user=test_ulak_node"
        " target_session_attrs=read-write"
    )
    with Node(dsn):
        site.wait_for_status(site.send("shop"), "completed")


def test_of_several_hosts_none_keeps_a_node_from_the_others(site: Site, receiver: Receiver) -> None:
    """libpq stays with a host that accepts the connection and hangs up, or that rejects every login."""
    site.http("shop", receiver.url)
    with Receiver() as no_server:
        port = no_server.url.rpartition(":")[2].strip("/")
        hosts = f"host=127.0.0.1,{site.cluster.host},127.0.0.1 port={port},{site.cluster.port},{port}"
        with Node(f"{hosts} dbname={site.database} user=test_ulak_node sslmode=disable"):
            site.wait_for_status(site.send("shop"), "completed")


def test_what_the_session_of_a_node_is_like(site: Site) -> None:
    """Its commits wait for the disk, and a node that is cut off keeps no lock."""
    with site.connect("ulak_node") as session:
        session.execute("select ulak_private.enter_node_session()")
        found = dict(session.execute("select name, setting from pg_settings").fetchall())

    assert found["synchronous_commit"] == "on"
    assert found["idle_in_transaction_session_timeout"] == "10000"
    assert (found["jit"], found["enable_seqscan"], found["lock_timeout"]) == ("off", "off", "250")


def test_a_search_path_of_the_database_does_not_reach_a_node(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.db.execute("create schema evil")
    site.db.execute(
        "create function evil.make_interval(secs float8) returns interval language sql as $$ select 1/0; select null::interval $$"
    )
    site.db.execute("grant usage on schema evil to public")
    site.db.execute(f"alter database {site.database} set search_path = evil, pg_catalog")

    with Node(node_dsn(site.cluster, site.database)):
        site.wait_for_status(site.send("shop"), "completed")
