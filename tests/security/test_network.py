"""What somebody who reaches our ports, or sits between a node and its database, must not be able to do."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster import PROJECT, Cluster
from support.console import Console
from support.node import PROGRAM, PYTHON
from support.ports import free_port
from support.sessions import wait_until

EXPORTER = PROJECT / "docker/monitoring/prometheus/exporter.py"


# The console.


@pytest.mark.parametrize(
    "beginning", [b"", b"GET /login HTTP/1.1\r\nHost: x\r\n", b"POST /login HTTP/1.1\r\nContent-Length: 9\r\n\r\na"]
)
def test_connections_that_say_nothing_silence_no_console(
    cluster: Cluster, database: str, tmp_path: Path, beginning: bytes
) -> None:
    with Console(cluster, database, tmp_path / "log") as console, ExitStack() as stack:
        for _ in range(450):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", console.port)))
            connection.sendall(beginning)

        assert console.get("/login").status == 200


# The exporter.


@contextmanager
def exporter(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXPORTER), *arguments]
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def scrape(host: str, port: int, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_the_exporter_is_reached_from_its_own_machine_alone() -> None:
    port = free_port()

    with exporter(str(port)):
        wait_until(lambda: is_open("127.0.0.1", port), message="the exporter")

        # Of the same machine, and not the address that it listens on.
        assert not is_open("127.0.0.2", port)


def test_the_exporter_wants_a_token_where_others_reach_it(cluster: Cluster, database: str) -> None:
    with exporter(f"0.0.0.0:{free_port()}") as process:
        assert process.wait(20) != 0
        assert process.stderr is not None
        assert "ULAK_EXPORTER_TOKEN" in process.stderr.read()

    port = free_port()
    known = {"PGHOST": str(cluster.host), "PGPORT": str(cluster.port), "PGUSER": cluster.user, "PGDATABASE": database}
    with exporter(f"0.0.0.0:{port}", ULAK_EXPORTER_TOKEN="hush-token", **known):
        wait_until(lambda: is_open("127.0.0.2", port), message="the exporter")
        assert scrape("127.0.0.2", port)[0] == 401
        assert scrape("127.0.0.2", port, authorization="Bearer other")[0] == 401
        status, body = scrape("127.0.0.2", port, authorization="Bearer hush-token")
        assert (status, "ulak_" in body) == (200, True)


def test_the_exporter_can_be_told_how_many_endpoints_it_exports(cluster: Cluster, database: str) -> None:
    with cluster.connect(database) as db:
        db.execute("select ulak.create_endpoint('shop ' || n, 'pull', '{}') from generate_series(1, 5) n")
    port = free_port()
    known = {"PGHOST": str(cluster.host), "PGPORT": str(cluster.port), "PGUSER": cluster.user, "PGDATABASE": database}

    for bounds, told in (({}, 5), ({"ENDPOINTS": "2"}, 2), ({"ACTIVE_WITHIN": "1 hour"}, 0)):
        with exporter(str(port), **known, **{f"ULAK_EXPORTER_{name}": value for name, value in bounds.items()}):
            wait_until(lambda: is_open("127.0.0.1", port), message="the exporter")
            status, body = scrape("127.0.0.1", port)
        assert (status, body.count("ulak_endpoint_enabled{")) == (200, told)


def test_the_exporter_does_not_pass_on_what_psql_says() -> None:
    port = free_port()
    with exporter(str(port), PGHOST="/nonexistent/hush", PGUSER="hush", PGDATABASE="hush"):
        wait_until(lambda: is_open("127.0.0.1", port), message="the exporter")

        status, body = scrape("127.0.0.1", port)

    assert status == 503
    assert "hush" not in body


def test_the_monitoring_example_makes_no_visitor_an_administrator() -> None:
    services = re.split(r"^  (?=\w)", (PROJECT / "docker/monitoring/compose.yaml").read_text(), flags=re.MULTILINE)
    grafana = next(each for each in services if each.startswith("grafana:"))
    scraper = next(each for each in services if each.startswith("exporter:"))

    assert re.search(r"GF_AUTH_ANONYMOUS_ORG_ROLE: Viewer$", grafana, re.MULTILINE)
    assert 'GF_AUTH_DISABLE_LOGIN_FORM: "true"' in grafana
    assert "user: nobody" in scraper
    assert "ports:" not in scraper
    assert "0.0.0.0" not in scraper


# A node, and an impostor of its database.


@contextmanager
def node(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [PYTHON, "-B", str(PROGRAM), *arguments]
    known = {"PATH": "/usr/bin:/bin", **environment}
    with subprocess.Popen(command, env=known, cwd="/", stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("dsn", "environment"),
    [
        ("host=192.0.2.1", {}),
        ("host=db.invalid", {}),
        ("host=192.0.2.1 sslmode=require", {}),
        ("host=192.0.2.1 sslmode=verify-ca sslrootcert=system", {}),
        ("hostaddr=192.0.2.1 host=localhost", {}),
        ("host=127.0.0.1,192.0.2.1", {}),
        ("postgresql://192.0.2.1/shop", {}),
        ("", {"PGHOST": "192.0.2.1"}),
        ("", {"PGHOSTADDR": "192.0.2.1"}),
        ("", {"PGHOST": "192.0.2.1", "PGSSLMODE": "prefer"}),
    ],
)
def test_a_node_takes_no_code_from_a_server_without_verify_full(dsn: str, environment: dict[str, str]) -> None:
    with node("--dsn", dsn, **environment) as process:
        code = process.wait(20)
        assert process.stderr is not None
        told = process.stderr.read().decode()

    assert code == 2
    assert "sslmode=verify-full" in told


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--dsn", "host=127.0.0.1 port=1"], {}),
        (["--dsn", "host=/nonexistent"], {}),
        (["--dsn", "host=::1 port=1"], {}),
        (["--dsn", "hostaddr=127.0.0.1 host=db.invalid port=1"], {}),
        (["--dsn", "host=db.invalid sslmode=verify-full"], {}),
        (["--dsn", "host=db.invalid"], {"PGSSLMODE": "verify-full"}),
        (["--dsn", "host=db.invalid", "--insecure"], {}),
    ],
)
def test_a_node_goes_on_trying_where_it_may(arguments: list[str], environment: dict[str, Any]) -> None:
    with node(*arguments, **environment) as process:
        assert process.stderr is not None
        told = process.stderr.readline().decode()
        code = process.poll()

    assert code is None
    assert "verify-full with" not in told
