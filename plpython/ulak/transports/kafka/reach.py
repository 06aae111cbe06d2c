"""How a cluster is reached: every address is judged before messages are handed to librdkafka, which dials on its own.

All of this waits, so it runs in threads. What librdkafka's binding for Python doesn't allow is to judge when it is
dialled: a name may resolve to another address for librdkafka than it did for us, and a cluster may name another broker
between two looks.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, libversion

from ulak.messages.delivery import PERMANENT
from ulak.safety.address import Guard
from ulak.sessions.leaving import skip_exit_handlers
from ulak.transports.broker.errors import Lost
from ulak.transports.kafka import verdict
from ulak.transports.kafka.target import Target

# Seconds for the first request for metadata; after it, errors are looked at.
_FIRST_LOOK = 0.1
_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
# Later versions send metrics to any broker that the cluster names, and would dial it before it is judged.
_SILENT = {"enable.metrics.push": False} if libversion()[1] >= 0x020500FF else {}
# Waiting longer wouldn't help: the credentials are wrong for all brokers, or all brokers are down.
_HOPELESS = (KafkaError._AUTHENTICATION, KafkaError._ALL_BROKERS_DOWN)


def reach(
    target: Target, guard: Guard, topic: str, errors: deque[KafkaError], until: float, clock: Callable[[], float]
) -> Producer:
    """A producer that knows its cluster. Raises Lost."""
    servers = _servers(target, guard)
    properties = {**target.properties, **_SILENT, "bootstrap.servers": ",".join(servers), "error_cb": errors.append}
    skip_exit_handlers()
    try:
        producer = Producer(properties)
    except KafkaException as error:
        raise Lost(f"config: {error.args[0].str()}") from None
    metadata = _metadata(producer, topic, errors, until, clock, target.peer)
    judge(target, guard, metadata)
    return producer


def look(producer: Producer, target: Target, guard: Guard, topic: str, seconds: float) -> None:
    """Checks that all brokers of the cluster may still be dialled. Raises Lost."""
    try:
        metadata = producer.list_topics(topic, timeout=seconds)
    except KafkaException:
        # No broker answers now; messages in flight have their own time-out.
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


def _servers(target: Target, guard: Guard) -> list[str]:
    """The bootstrap servers: by address, so that exactly what was judged is dialled. With TLS by name, as certificates
    are for names."""
    servers: list[str] = []
    for host, port in target.brokers:
        if refusal := guard.host_refusal(host):
            raise Lost(f"config: {refusal}")
        addresses = _addresses(target, host, port)
        refusals = {each: refusal for each in addresses if (refusal := guard.refusal(each))}
        if refusals and (target.has_tls or len(refusals) == len(addresses)):
            # Retrying doesn't help: a forbidden address stays forbidden.
            raise Lost(f"blocked: {host}:{port}: {next(iter(refusals.values()))}", PERMANENT)
        dialled = [host] if target.has_tls and addresses else [each for each in addresses if each not in refusals]
        servers += (f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in dialled)
    if not servers:
        host, port = target.brokers[0]
        raise Lost(f"resolve: {host}:{port}: the name has no address")
    return servers


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
            kind = "login" if any(each.code() in verdict.LOGIN for each in known) else "network"
            raise Lost(f"{kind}: {reason(known) or f'{peer}: {verdict.words(failed)}'}")
        wait *= 2


def reason(errors: Iterable[KafkaError]) -> str | None:
    """The last error that says more than that all brokers are down."""
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
