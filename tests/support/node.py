"""Nodes for tests: docker/node/worker.py in processes of their own, with Debian's own Python, as on another machine."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from support.cluster import PROJECT, WORK, Cluster
from support.receiver import Answer, Received, Receiver
from support.sessions import patience, wait_until
from support.site import Site

PYTHON = "/usr/bin/python3"
PROGRAM = PROJECT / "docker/node/worker.py"


def node_dsn(cluster: Cluster, database: str, **options: object) -> str:
    """As a member of ulak_node."""
    extra = "".join(f" {name}={value}" for name, value in options.items())
    return cluster.dsn(database, "test_ulak_node") + extra


class Node:
    """One process. What it says is in `log`."""

    def __init__(
        self, dsn: str, *arguments: str, environment: dict[str, str] | None = None, prefix: list[str] | None = None
    ) -> None:
        """`prefix` is a command that runs the rest of its arguments."""
        WORK.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="node-", suffix=".log", dir=WORK)
        self.log = Path(name)
        # Nothing of the tests' own environment: no venv, no module path.
        with os.fdopen(handle, "wb") as log:
            self.process = subprocess.Popen(
                [*(prefix or []), PYTHON, "-B", str(PROGRAM), "--dsn", dsn, *arguments],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **(environment or {})},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def wait_until_says(self, text: str) -> None:
        wait_until(lambda: self.says(text) or self._ended(text), f"{text!r} from the node: {self.lines()}")

    def _ended(self, text: str) -> bool:
        if self.process.poll() is not None and not self.says(text):
            raise AssertionError(f"the node ended with {self.process.returncode}: {self.lines()}")
        return False

    def tell(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """For its end: returns its exit code."""
        return self.process.wait(patience())

    def kill(self) -> None:
        self.tell(signal.SIGCONT)
        self.tell(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()
        self.log.unlink()


class Held:
    """A receiver whose answers wait until they are released."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.receiver = Receiver(self._answer)

    def _answer(self, request: Received) -> Answer:
        self._released.wait()
        return Answer()

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()
        self.receiver.close()


StartNode = Callable[..., Node]

RUNNING = "select * from ulak.get_worker_status() where host is not null and state = 'running' order by slot"


def wait_for_nodes(site: Site, count: int) -> list[dict[str, Any]]:
    """The rows of those that deliver."""

    def running() -> list[dict[str, Any]] | None:
        rows = site.rows(RUNNING)
        return rows if len(rows) == count else None

    return wait_until(running, f"{count} nodes") or []
