"""Ports for servers that can't be asked which one they got. Whoever can bind port 0 does that instead."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# Below those that the kernel gives to connections, so that none takes a port before its server does.
RANGE = range(15000, 32000)
TRIES = 3

# Abstract sockets, which no two processes of a machine can bind, and which end with their process: they keep a port for this run.
_locks: list[socket.socket] = []


def free_port() -> int:
    """One that no other test of this machine gets until this process ends."""
    while True:
        port = random.SystemRandom().choice(RANGE)
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0ulak-tests-port-{port}")
        except OSError:
            lock.close()
            continue
        _locks.append(lock)
        if not is_taken(port):
            return port


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections that have just ended don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return False
    return True


def closed_port() -> int:
    """Nobody listens there, and no server of these tests will."""
    return free_port()


def start_on_free_port(start: Callable[..., Result], count: int = 1) -> Result:
    """Calls start() with this many ports. If that fails because some other program has taken one, it is tried again with others."""
    for _ in range(TRIES - 1):
        ports = [free_port() for _ in range(count)]
        try:
            return start(*ports)
        except Exception:
            if not any(map(is_taken, ports)):
                raise
    return start(*(free_port() for _ in range(count)))
