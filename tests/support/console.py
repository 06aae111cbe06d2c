"""docker/console over a database, in a process of its own, and requests to it as any program can make them."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from support.cluster import PROJECT, Cluster
from support.ports import start_on_free_port
from support.sessions import patience, wait_until


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    @property
    def cookies(self) -> dict[str, str]:
        given = self.headers.get_all("Set-Cookie") or []
        return dict(each.split(";")[0].split("=", 1) for each in given)

    def hidden(self, name: str) -> str:
        """The value of a hidden field."""
        found = re.search(rf'<input type="hidden" name="{name}" value="([^"]*)"', self.text)
        assert found is not None, self.text
        return found[1]


class Console:
    def __init__(self, cluster: Cluster, database: str, log: Path, **environment: str) -> None:
        self.log = log
        self._environment = {
            **os.environ,
            "ULAK_CONSOLE_DATABASE": f"host={cluster.host} port={cluster.port} dbname={database}",
            "PYTHONPATH": str(PROJECT / "docker/console"),
            **environment,
        }

    def __enter__(self) -> Console:
        start_on_free_port(self._start_at)
        return self

    def _start_at(self, port: int) -> None:
        self.port = port
        self.origin = f"http://127.0.0.1:{port}"
        environment = {**self._environment, "ULAK_CONSOLE_LISTEN": f"127.0.0.1:{port}"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ulak_console"], env=environment, stdout=log, stderr=log
            )
        wait_until(self._answers, "the console")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self.get("/login").status == 200
        except ConnectionRefusedError:
            return False

    def count_descriptors(self) -> int:
        """Of files: its connections, and a few others."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def get(self, path: str, cookies: Mapping[str, str] | None = None, **headers: str) -> Answer:
        return self._ask("GET", path, None, cookies or {}, headers)

    def post(
        self, path: str, form: Mapping[str, str], cookies: Mapping[str, str] | None = None, **headers: str
    ) -> Answer:
        """From a page of the console, unless the headers say otherwise."""
        return self._ask("POST", path, urllib.parse.urlencode(form), cookies or {}, {"Origin": self.origin, **headers})

    def _ask(
        self, method: str, path: str, body: str | None, cookies: Mapping[str, str], headers: Mapping[str, str]
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience())
        sent = {name: value for name, value in headers.items() if value}
        if cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        if body is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, body, sent)
        try:
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def login(self, role: str, password: str) -> Answer:
        form = self.get("/login")
        return self.post("/login", {"token": form.hidden("token"), "role": role, "password": password}, form.cookies)
