"""How a cluster is reached: every address is judged before messages are handed to librdkafka, which dials on its own.

All of this waits, so it runs in threads. What librdkafka's binding for Python doesn't allow is to judge when it is
dialled: a name may resolve to another address for librdkafka than it did for us, and a cluster may name another broker
between two looks.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, libversion

from ulak.messages.delivery import PERMANENT
from ulak.safety.address import Guard
from ulak.transports.broker.errors import Lost
from ulak.transports.kafka import verdict
from ulak.transports.kafka.target import Target

# Seconds that the first question for metadata may take; then it is asked what has gone wrong meanwhile.
_FIRST_LOOK = 0.1
_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
# Later versions tell a broker about themselves, and dial any that the cluster names to do so, before it is judged.
_SILENT = {"enable.metrics.push": False} if libversion()[1] >= 0x020500FF else {}
# To wait longer would not help: all brokers take the same credentials, or all of them are down.
_HOPELESS = (KafkaError._AUTHENTICATION, KafkaError._ALL_BROKERS_DOWN)


def reach(
    target: Target, guard: Guard, topic: str, errors: deque[KafkaError], until: float, clock: Callable[[], float]
) -> Producer:
    """A producer that knows its cluster. Raises Lost."""
    servers = list(_servers(target, guard))
    properties = {**target.properties, **_SILENT, "bootstrap.servers": ",".join(servers), "error_cb": errors.append}
    try:
        producer = Producer(properties)
    except KafkaException as error:
        raise Lost(f"config: {error.args[0].str()}") from None
    metadata = _metadata(producer, topic, errors, until, clock, target.peer)
    judge(target, guard, metadata)
    return producer


def look(producer: Producer, target: Target, guard: Guard, topic: str, seconds: float) -> None:
    """Whether the cluster still names none but brokers that may be dialled. Raises Lost if it doesn't."""
    try:
        metadata = producer.list_topics(topic, timeout=seconds)
    except KafkaException:
        # No broker answers now; what is under way has its own timeout.
        return
    judge(target, guard, metadata)


def judge(target: Target, guard: Guard, metadata: Any) -> None:
    """Raises Lost if the cluster names a broker that may not be dialled."""
    for broker in metadata.brokers.values():
        if refusal := guard.host_refusal(broker.host):
            raise Lost(f"config: the cluster names broker {broker.host}:{broker.port}: {refusal}")
        # A name that resolves to nothing has no addresses here, and librdkafka can't dial it either.
        for address in _addresses(target, broker.host, broker.port):
            if problem := guard.refusal(address):
                raise Lost(f"blocked: the cluster names broker {broker.host}:{broker.port}: {problem}", PERMANENT)


def _servers(target: Target, guard: Guard) -> Iterator[str]:
    """Where to ask for the cluster: by address, so that what was judged is dialled. But a certificate is for a name."""
    unknown = ""
    is_any = False
    for host, port in target.brokers:
        if refusal := guard.host_refusal(host):
            raise Lost(f"config: {refusal}")
        addresses = _addresses(target, host, port)
        blocked = [wrong for each in addresses if (wrong := guard.refusal(each))]
        if blocked and (target.has_tls or len(blocked) == len(addresses)):
            # A forbidden address stays forbidden, however often it is tried.
            raise Lost(f"blocked: {host}:{port}: {blocked[0]}", PERMANENT)
        if not addresses:
            unknown = unknown or f"resolve: {host}:{port}: the name has no address"
        elif target.has_tls:
            is_any = True
            yield _at(host, port)
        else:
            is_any = True
            yield from (_at(each, port) for each in addresses if not guard.refusal(each))
    if not is_any:
        raise Lost(unknown)


def _metadata(
    producer: Producer, topic: str, errors: Iterable[KafkaError], until: float, clock: Callable[[], float], peer: str
) -> Any:
    wait = _FIRST_LOOK
    while True:
        try:
            return producer.list_topics(topic, timeout=max(0.01, min(wait, until - clock())))
        except KafkaException as error:
            failed = error.args[0]
        # Runs error_cb for the errors so far.
        producer.poll(0)
        known = list(errors)
        if any(each.code() in _HOPELESS for each in known) or clock() >= until:
            kind = "login" if any(verdict.is_login(each) for each in known) else "network"
            raise Lost(f"{kind}: {reason(known) or f'{peer}: {verdict.words(failed)}'}")
        wait *= 2


def reason(errors: Iterable[KafkaError]) -> str | None:
    """The last that says more than that there is no broker."""
    found = None
    for each in errors:
        if each.code() != KafkaError._ALL_BROKERS_DOWN:
            found = verdict.words(each)
    return found


def _addresses(target: Target, host: str, port: int) -> list[str]:
    family = _FAMILIES.get(str(target.properties.get("broker.address.family")), socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
