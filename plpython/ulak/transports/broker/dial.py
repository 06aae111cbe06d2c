"""Dials a broker: resolves its name, judges each address, and connects to the first that answers. This blocks, so it
runs in a thread. TLS doesn't: OpenSSL must not be running in a thread when the session ends."""

from __future__ import annotations

import socket
import time
from typing import Any

from ulak.messages.delivery import PERMANENT
from ulak.safety.address import Guard
from ulak.transports.broker.errors import Lost, words


def dial(guard: Guard, host: str, port: int, seconds: float) -> socket.socket:
    """A connection that doesn't block. Raises Lost."""
    ends = time.monotonic() + seconds
    if refusal := guard.host_refusal(host):
        raise Lost(f"config: {refusal}")
    addresses = _allowed(guard, _resolve(host, port))
    problem = "no address"
    for number, (family, where) in enumerate(addresses):
        # Split the time, so that an address that doesn't answer leaves some for the others.
        share = (ends - time.monotonic()) / (len(addresses) - number)
        try:
            return _connect(family, where, max(share, 0.001))
        except OSError as error:
            problem = words(error)
        if time.monotonic() >= ends:
            raise Lost(f"timeout: no connection to {host}:{port} in time")
    raise Lost(f"connect: {problem} ({host}:{port})")


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Lost(f"resolve: {host}: {words(error)}") from None
    return [(family, where) for family, _, _, _, where in found]


def _allowed(guard: Guard, found: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Judges the addresses that will be dialled, not the name."""
    refusals = [guard.refusal(where[0]) for _, where in found]
    if refusals and None not in refusals:
        # Retrying doesn't help: a forbidden address stays forbidden.
        raise Lost(f"blocked: {refusals[-1]}", PERMANENT)
    return [each for each, refusal in zip(found, refusals, strict=True) if refusal is None]


def _connect(family: int, where: Any, seconds: float) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.settimeout(seconds)
        opened.connect(where)
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened
