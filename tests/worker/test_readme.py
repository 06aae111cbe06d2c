"""What README shows runs: its SQL in the order of the page, and its receivers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import PROJECT, Cluster, free_port
from support.sessions import wait_until
from support.site import Site

README = (PROJECT / "README.md").read_text()


def shown(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def readers_database(cluster: Cluster, template: str) -> Iterator[str]:
    name = cluster.create_database("reader", template)
    yield name
    cluster.drop_database(name)
    for role in re.findall(r"^create role (\w+)", README, re.MULTILINE):
        cluster.execute(f"drop role if exists {role}")


def test_every_statement_of_readme_does_what_the_page_says(cluster: Cluster, readers_database: str) -> None:
    """An error is one that the page shows, in its words."""
    script = "\n".join(shown("sql"))

    done = subprocess.run(
        [cluster.bin / "psql", "-X", "-q", "-d", cluster.dsn(readers_database)],
        input=script,
        text=True,
        capture_output=True,
        check=False,
    )

    assert "ulak.send(" in script
    assert re.findall(r"^ERROR: .*", done.stderr, re.MULTILINE) == re.findall(r"^-- (ERROR: .*)", script, re.MULTILINE)


def receiver_in_python(folder: Path) -> list[str]:
    program = folder / "receiver.py"
    program.write_text(shown("python")[0])
    return [sys.executable, str(program)]


def receiver_in_node(folder: Path) -> list[str]:
    program = folder / "receiver.js"
    program.write_text(shown("js")[0])
    return ["node", str(program)]


@pytest.mark.parametrize("write", [receiver_in_python, receiver_in_node])
def test_a_receiver_of_readme_takes_each_message_once_and_no_forgery(site: Site, tmp_path: Path, write: object) -> None:
    assert callable(write)
    command = write(tmp_path)
    if command[0] == "node" and not any((Path(folder) / "node").exists() for folder in os.get_exec_path()):
        pytest.skip("there is no Node here")
    port = free_port()
    site.http(
        "orders", f"http://127.0.0.1:{port}/hooks", policy={"backoff": "schedule", "schedule": [0], "max_retries": 1000}
    )
    secret = str(site.call("rotate_secret", "orders"))
    site.http("forger", f"http://127.0.0.1:{port}/hooks", signing_secret="whsec_" + "A" * 44)
    printed = tmp_path / "printed"
    environment = {**os.environ, "WEBHOOK_SECRET": secret, "PORT": str(port)}
    with printed.open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.DEVNULL)
    try:
        site.start()
        first = site.wait_for_status(site.send("orders", {"order": 42}), "completed")
        site.db.execute("update ulak.queue set status = 'pending', completed_at = null where id = %s", [first["id"]])
        site.wait_for_status(first["id"], "completed")
        # Both secrets sign while the grace lasts; the receiver knows the old one.
        site.call("rotate_secret", "orders", grace="1 hour")
        site.wait_for_status(site.send("orders", {"order": 43}), "completed")
        forged = site.wait_for_status(site.send("forger", {"order": 44}), "failed")

        wait_until(lambda: len(printed.read_text().splitlines()) >= 2, message="what was received")
        assert printed.read_text().splitlines() == ['{"order": 42}', '{"order": 43}']
        assert site.message(first["id"])["attempts"] == 2
        assert "HTTP 401" in forged["last_error"]
    finally:
        process.terminate()
        process.wait()
