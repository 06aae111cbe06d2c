"""Servers that are programs of their own, started as child processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.sessions import wait_until


def start_program(
    command: Sequence[str | Path], log: Path, is_up: Callable[[], object], **options: Any
) -> subprocess.Popen[bytes]:
    """The process, once is_up() is true. One that ends instead, or hangs, is an error with what it has written to its log; it holds no port
    any more then, so that start_on_free_port() can tell why it failed."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)

    def has_started() -> object:
        assert process.poll() is None, f"{command[0]} has ended: {log.read_text(errors='replace')}"
        return is_up()

    try:
        wait_until(has_started, f"{command[0]} (log: {log})")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process
