"""Another machine, as far as the network goes: a namespace of its own whose only line to the server can be cut.

Two namespaces, joined by a pair of virtual interfaces. On one side live a node and its receivers; on the other a process that
passes on to the server's socket what comes to ADDRESS, port 5432. No privilege is needed where the kernel lets everybody make
namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

ADDRESS = "10.99.0.2"
NEAR_ADDRESS = "10.99.0.1"
PORT = 5432
# Packets to it are lost.
NOBODY = "02:00:00:00:00:0f"

# What is lost is noticed within three seconds or so.
BOUNDS = "connect_timeout=2 tcp_user_timeout=2000 keepalives_idle=1 keepalives_interval=1 keepalives_count=2"


def can_be_made() -> bool:
    return subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode == 0


class Machine:
    """`prefix` runs a command on it."""

    def __init__(self, server_socket: Path) -> None:
        command = ["unshare", "-rn", sys.executable, "-m", "support.network", "near", str(server_socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")
        self.prefix = ["nsenter", "-t", str(self._process.pid), "-U", "-n", "--preserve-credentials"]

    def dsn(self, database: str, user: str, bounds: str = BOUNDS) -> str:
        return f"host={ADDRESS} port={PORT} dbname={database} user={user} {bounds}"

    def cut(self) -> None:
        """The line has no carrier."""
        self._tell("down")

    def mend(self) -> None:
        self._tell("up")

    def drop(self) -> None:
        """Packets are sent in both directions, and none arrives."""
        self._tell("drop")

    def stop_dropping(self) -> None:
        self._tell("pass")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.wait()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._read(command)

    def _read(self, expected: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != expected:
            raise RuntimeError(f"the other machine says {line!r}")


# The side of the node.


def near(server_socket: str) -> None:
    far = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-m", "support.network", "far", server_socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert far.stdin is not None and far.stdout is not None
    assert far.stdout.readline() == "here\n"
    ip("link", "set", "lo", "up")
    ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far.pid))
    ip("address", "add", f"{NEAR_ADDRESS}/24", "dev", "near")
    ip("link", "set", "near", "up")
    for command in itertools.chain(["up"], sys.stdin):
        far.stdin.write(command.strip() + "\n")
        far.stdin.flush()
        answer = far.stdout.readline()
        pass_or_drop(command.strip(), ADDRESS, "near")
        print("ready" if command == "up" else answer.strip(), flush=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def pass_or_drop(command: str, address: str, device: str) -> None:
    if command == "drop":
        ip("neighbour", "replace", address, "lladdr", NOBODY, "dev", device, "nud", "permanent")
    elif command == "pass":
        ip("neighbour", "del", address, "dev", device)


# The side of the server.


async def far(server_socket: str) -> None:
    print("here", flush=True)
    is_first = True
    loop = asyncio.get_running_loop()
    while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if is_first:
            is_first = False
            ip("address", "add", f"{ADDRESS}/24", "dev", "far")
        if command in ("up", "down"):
            ip("link", "set", "far", command)
        pass_or_drop(command, NEAR_ADDRESS, "far")
        if command == "up" and "server" not in locals():
            server = await asyncio.start_server(lambda r, w: pass_on(r, w, server_socket), ADDRESS, PORT)
        print(command, flush=True)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server_socket: str) -> None:
    # As the server would with a connection of its own, by what the node asked it to set.
    line: socket.socket = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        server_reader, server_writer = await asyncio.open_unix_connection(server_socket)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "near":
        near(sys.argv[2])
    else:
        asyncio.run(far(sys.argv[2]))
        os._exit(0)
