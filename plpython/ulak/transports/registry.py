"""The transports of a worker, by protocol. A new one is added here and to ulak_private.protocol_facts()."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from ulak.messages.delivery import ConfigError
from ulak.safety.address import guard
from ulak.transports.dispatcher import MakeTransport
from ulak.transports.transport import Descriptors, Transport


class Client(NamedTuple):
    """A Python module or a shared library, and its Debian package, which workers need to deliver over a protocol."""

    name: str
    package: str
    # If not empty, only a config with one of these keys needs it.
    keys: frozenset[str] = frozenset()


CLIENTS: Mapping[str, tuple[Client, ...]] = {
    "amqp": (Client("pika", "python3-pika"),),
    "http": (
        Client("pycurl", "python3-pycurl"),
        # Not a key of the config: missing_clients() uses this word for a signing secret that starts with whsk_.
        Client("cryptography", "python3-cryptography", frozenset(("ed25519",))),
    ),
    "kafka": (Client("librdkafka.so.1", "librdkafka1"),),
    "mqtt": (Client("paho", "python3-paho-mqtt"),),
    "nats": (Client("cryptography", "python3-cryptography", frozenset(("nkey_seed", "credentials_file"))),),
    "redis": (Client("redis", "python3-redis"),),
}


def missing_client(protocol: str, config: Collection[str] = ()) -> str | None:
    """The package that is missing to deliver over this protocol, with a config that has these keys."""
    for client in CLIENTS.get(protocol, ()):
        if (not client.keys or not client.keys.isdisjoint(config)) and not _is_installed(client.name):
            return client.package
    return None


def _is_installed(name: str) -> bool:
    if ".so." not in name:
        return find_spec(name) is not None
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def transports(
    settings: Mapping[str, str],
    version: str,
    max_in_flight: int,
    log: Callable[[str], object],
    now: Callable[[], float],
) -> Mapping[str, MakeTransport]:
    """`settings` are those of ulak.settings; log() writes a line to the server's log; now() is the server's time."""

    def http(descriptors: Descriptors) -> Transport:
        from ulak.transports.http.client import Client
        from ulak.transports.http.model import Settings
        from ulak.transports.http.transport import HttpTransport

        client = Client(guard(settings), descriptors, max_in_flight)
        return HttpTransport(client, now, Settings.of(settings, version))

    def log_lines(descriptors: Descriptors) -> Transport:
        from ulak.transports.log.transport import LogTransport

        return LogTransport(log)

    def broker(protocol: str, link: str, descriptors: Descriptors) -> Transport:
        from ulak.transports.broker.target import Defaults
        from ulak.transports.broker.transport import BrokerTransport

        module = import_module(f"ulak.transports.{protocol}.connection")
        defaults = Defaults(version, float(settings["http_timeout"]), settings["cloudevents_source"])
        return BrokerTransport(module.Target, getattr(module, link), descriptors, guard(settings), defaults)

    makers: dict[str, MakeTransport] = {
        "amqp": partial(broker, "amqp", "AmqpConnection"),
        "http": http,
        "kafka": partial(broker, "kafka", "KafkaConnection"),
        "log": log_lines,
        "mqtt": partial(broker, "mqtt", "MqttConnection"),
        "nats": partial(broker, "nats", "NatsConnection"),
        "redis": partial(broker, "redis", "RedisConnection"),
    }

    def checked(protocol: str, descriptors: Descriptors) -> Transport:
        if package := missing_client(protocol):
            raise ConfigError(f"{package} isn't installed where the worker runs, and protocol {protocol} needs it")
        return makers[protocol](descriptors)

    return {protocol: partial(checked, protocol) for protocol in makers}
