"""What somebody who reaches our ports, or sits between a node and its database, must not be able to do."""

from __future__ import annotations

import errno
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import exporter
from support.cluster import PROJECT, Cluster
from support.console import Console
from support.exporter import Exporter
from support.node import PROGRAM, PYTHON
from support.sessions import patience

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
        # Or else more of them would use up its file descriptors.
        assert console.count_descriptors() < 450


# The exporter.


def test_the_exporter_is_reached_from_its_own_machine_alone(tmp_path: Path) -> None:
    with Exporter(tmp_path / "log") as local, socket.socket() as probe:
        # Of the same machine, and not the address that it listens on.
        assert probe.connect_ex(("127.0.0.2", local.port)) == errno.ECONNREFUSED


def test_the_exporter_wants_a_token_where_others_reach_it(cluster: Cluster, database: str, tmp_path: Path) -> None:
    refused = subprocess.run([*exporter.PROGRAM, "0.0.0.0:0"], stderr=subprocess.PIPE, text=True, timeout=patience())
    assert refused.returncode != 0
    assert "ULAK_EXPORTER_TOKEN" in refused.stderr

    known = exporter.variables(cluster, database)
    with Exporter(tmp_path / "log", "0.0.0.0", ULAK_EXPORTER_TOKEN="hush-token", **known) as open_to_all:
        assert open_to_all.scrape("127.0.0.2")[0] == 401
        assert open_to_all.scrape("127.0.0.2", authorization="Bearer other")[0] == 401
        assert "ulak_" in open_to_all.metrics("127.0.0.2", authorization="Bearer hush-token")


def test_the_exporter_can_be_told_how_many_endpoints_it_exports(
    cluster: Cluster, database: str, tmp_path: Path
) -> None:
    with cluster.connect(database) as db:
        db.execute("select ulak.create_endpoint('shop ' || n, 'pull', '{}') from generate_series(1, 5) n")
    known = exporter.variables(cluster, database)

    for bounds, told in (({}, 5), ({"ENDPOINTS": "2"}, 2), ({"ACTIVE_WITHIN": "1 hour"}, 0)):
        given = {f"ULAK_EXPORTER_{name}": value for name, value in bounds.items()}
        with Exporter(tmp_path / "log", **known, **given) as bounded:
            assert bounded.metrics().count("ulak_endpoint_enabled{") == told


def test_the_exporter_does_not_pass_on_what_psql_says(tmp_path: Path) -> None:
    with Exporter(tmp_path / "log", PGHOST="/nonexistent/hush", PGUSER="hush", PGDATABASE="hush") as lost:
        status, body = lost.scrape()

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
    assert not re.search(r"0\.0\.0\.0", scraper)


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
        code = process.wait(patience())
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
