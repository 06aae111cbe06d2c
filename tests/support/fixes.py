"""What start() and doctor() say to do, done as it is: SQL is pasted into psql, and the command for root into a shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.cluster import PROJECT, Cluster, run

SETUP = PROJECT / "control" / "ulak-setup"
IN_A_SHELL = "-- as root on the server: "


def setup_command(cluster: Cluster, database: str, *options: str) -> str:
    """As it is printed where no name needs quotes."""
    return " ".join([f"{IN_A_SHELL}ulak-setup --data {cluster.data} {database}", *options])


def try_in_shell(fix: str, program: str) -> subprocess.CompletedProcess[str]:
    """The line as a shell reads it. The program is what it finds by the name ulak-setup."""
    line = fix.removeprefix(IN_A_SHELL)
    assert line.startswith("ulak-setup ") and line != fix
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "ulak-setup")).write_text(f"#!/bin/sh\n{program}\n")
        file.chmod(0o700)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        return subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )


def try_setup(cluster: Cluster, fix: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The real one. Where the server is reached and who its superuser is, a cluster of tests has its own ways."""
    given = " ".join(["--host", cluster.host, "--role", cluster.user, *(options or ["--yes"])])
    return try_in_shell(fix, f'exec {sys.executable} {SETUP} {given} "$@"')


def paste(cluster: Cluster, database: str, fix: str) -> str:
    """What is said, if all is well."""
    assert "\n" not in fix
    if fix.startswith(IN_A_SHELL):
        done = try_setup(cluster, fix)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    psql: list[str | Path] = [cluster.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", cluster.dsn(database)]
    said = run(psql, input=fix + "\n")
    assert "ERROR" not in said and "invalid" not in said
    return said
