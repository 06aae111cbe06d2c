"""The servers of an endpoint: those of its config, and those that the cluster advertises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ulak.messages.delivery import ConfigError
from ulak.transports.broker.target import Address

PORT = 4222
# How many advertised servers are kept; a larger cluster has enough others.
MOST_ADVERTISED = 32

_SERVER = re.compile(r"(?:(nats|tls)://)?(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?/?")


def parse(text: str) -> tuple[str, int, bool]:
    """Host, port, and whether its scheme asks for TLS. Raises ConfigError."""
    found = _SERVER.fullmatch(text.strip())
    port = int(found[4] or PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        raise ConfigError("url must be nats://host:port, or several of them with commas between")
    return found[2] or found[3], port, found[1] == "tls"


class Servers:
    """Kept as long as the config. The next connection tries the last good server first."""

    def __init__(self, given: Iterable[Address]) -> None:
        self._given = tuple(given)
        self._advertised: tuple[Address, ...] = ()
        self._last: Address | None = None

    def in_turn(self) -> Iterator[Address]:
        """Advertised servers come last, since the config doesn't name them."""
        known = (*self._given, *self._advertised)
        first = (self._last,) if self._last in known else ()
        return iter(dict.fromkeys((*first, *known)))

    def worked(self, address: Address) -> None:
        self._last = address

    def advertised(self, urls: object, by: Address) -> None:
        """Takes the list of a server that accepted us. Its name is expected in their certificates, too, since most
        advertised servers are bare addresses."""
        found = []
        for url in urls if isinstance(urls, list) else ():
            try:
                host, port, _ = parse(str(url))
            except ConfigError:
                continue
            if not any((host, port) == (each.host, each.port) for each in self._given):
                found.append(Address(host, port, by.tls, by.name or by.host))
        self._advertised = tuple(found[:MOST_ADVERTISED])
