"""The exporter of docker/monitoring, in a process of its own."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path
from typing import Self

from support.cluster import PROJECT, Cluster
from support.ports import is_taken, start_on_free_port
from support.programs import start_program
from support.sessions import patience, wait_until

PROGRAM = [sys.executable, str(PROJECT / "docker/monitoring/prometheus/exporter.py")]


def variables(cluster: Cluster, database: str) -> dict[str, str]:
    """Of a monitor, for psql."""
    user = "test_ulak_monitor"
    return {"PGHOST": cluster.host, "PGPORT": str(cluster.port), "PGUSER": user, "PGDATABASE": database}


class Exporter:
    def __init__(self, log: Path, host: str = "127.0.0.1", **environment: str) -> None:
        self.log = log
        self.host = host
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        start_on_free_port(self._start_at)
        return self

    def _start_at(self, port: int) -> None:
        self.port = port
        command = [*PROGRAM, f"{self.host}:{port}"]
        self._process = start_program(command, self.log, lambda: is_taken(port), env=self._environment)

    def __exit__(self, *unused: object) -> None:
        self._process.terminate()
        self._process.wait()

    def scrape(self, host: str = "127.0.0.1", **headers: str) -> tuple[int, str]:
        """Status and body."""
        connection = http.client.HTTPConnection(host, self.port, timeout=patience())
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def metrics(self, host: str = "127.0.0.1", **headers: str) -> str:
        """Asked again while the database takes longer than the exporter waits for it."""

        def told() -> str:
            status, body = self.scrape(host, **headers)
            return body if status == 200 else ""

        try:
            return wait_until(told, "the exporter's metrics")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log.read_text()}") from None
