"""How a cluster is reached. librdkafka dials by itself, but asks the gate before each connection: nothing relies on
when it dials, or on what a name resolves to for it."""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Mapping

from ulak.messages.delivery import PERMANENT, RETRYABLE
from ulak.safety.address import Guard
from ulak.transports.broker.errors import Lost
from ulak.transports.kafka.target import Target

_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
# As librdkafka reads it. A cluster may name any text as a host, and for some of them it dials only a part.
_BROKER = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+|[0-9A-Fa-f:.]+)):[0-9]{1,5}")


def servers(target: Target, guard: Guard) -> Mapping[str, str]:
    """The bootstrap servers for librdkafka, and the host of the config that each stands for. Raises Lost. It resolves
    names, so it runs in a thread.

    They are addresses, so that each has its try; with TLS they are names, for which certificates are.
    """
    found: dict[str, str] = {}
    for host, port in target.brokers:
        if refusal := guard.host_refusal(host):
            raise Lost(f"config: {refusal}")
        addresses = _addresses(target, host, port)
        refusals = {each: refusal for each in addresses if (refusal := guard.refusal(each))}
        if refusals and (target.has_tls or len(refusals) == len(addresses)):
            # Retrying doesn't help: a forbidden address stays forbidden.
            raise Lost(f"blocked: {host}:{port}: {next(iter(refusals.values()))}", PERMANENT)
        dialled = [host] if target.has_tls and addresses else [each for each in addresses if each not in refusals]
        found |= {f"[{each}]:{port}" if ":" in each else f"{each}:{port}": host for each in dialled}
    if not found:
        host, port = target.brokers[0]
        raise Lost(f"resolve: {host}:{port}: the name has no address")
    return found


class Gate:
    """Judges each connection as it is dialled. Called in librdkafka's threads."""

    def __init__(self, guard: Guard, known: Mapping[str, str]) -> None:
        """`known` is what servers() has found."""
        self._guard = guard
        self._known = known
        # A text for people, and the prefix by which the database decides. One of them ends the connection.
        self.refusals: deque[tuple[str, str]] = deque(maxlen=1)

    def may_dial(self, broker: str, address: str) -> bool:
        if refusal := self._refusal(broker, address):
            self.refusals.append(refusal)
        return refusal is None

    def _refusal(self, broker: str, address: str) -> tuple[str, str] | None:
        parts = _BROKER.fullmatch(broker)
        named = broker if broker in self._known else f"the cluster names broker {broker}"
        if parts is None:
            return f"config: {named}: its host can't be read", RETRYABLE
        host = self._known.get(broker) or parts[1] or parts[2]
        if refusal := self._guard.host_refusal(host):
            return f"config: {named}: {refusal}", RETRYABLE
        if refusal := self._guard.refusal(address):
            # Retrying doesn't help: a forbidden address stays forbidden.
            return f"blocked: {named}: {refusal}", PERMANENT
        return None


def _addresses(target: Target, host: str, port: int) -> list[str]:
    family = _FAMILIES.get(str(target.properties.get("broker.address.family")), socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))
