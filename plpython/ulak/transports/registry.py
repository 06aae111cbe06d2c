"""The transports of a worker, by protocol. A new one is added here and to ulak_private.protocol_facts()."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from ulak.messages.delivery import ConfigError
from ulak.safety.address import guard
from ulak.worker.dispatcher import MakeTransport
from ulak.worker.transport import Transport
from ulak.worker.waiting import Descriptors


class Client(NamedTuple):
    """Python's module, and its Debian package. Only workers that deliver over a protocol need its client."""

    module: str
    package: str
    # If there are any, only a config with one of these keys needs it.
    keys: frozenset[str] = frozenset()


CLIENTS: Mapping[str, tuple[Client, ...]] = {
    "amqp": (Client("pika", "python3-pika"),),
    "http": (
        Client("pycurl", "python3-pycurl"),
        # No key of a config, but what missing_clients() calls a signing secret that starts with whsk_.
        Client("cryptography", "python3-cryptography", frozenset(("ed25519",))),
    ),
    "kafka": (Client("confluent_kafka", "python3-confluent-kafka"),),
    "mqtt": (Client("paho", "python3-paho-mqtt"),),
    "nats": (Client("cryptography", "python3-cryptography", frozenset(("nkey_seed", "credentials_file"))),),
    "redis": (Client("redis", "python3-redis"),),
}


def missing_client(protocol: str, config: Collection[str] = ()) -> str | None:
    """The package that has to be installed before a worker can deliver over this protocol, with a config that has these
    keys."""
    for client in CLIENTS.get(protocol, ()):
        if (not client.keys or not client.keys.isdisjoint(config)) and find_spec(client.module) is None:
            return client.package
    return None


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

    def broker(protocol: str, link: str) -> MakeTransport:
        def make(descriptors: Descriptors) -> Transport:
            from ulak.transports.broker.target import Defaults
            from ulak.transports.broker.transport import BrokerTransport

            module = import_module(f"ulak.transports.{protocol}.connection")
            defaults = Defaults(version, float(settings["http_timeout"]), settings["cloudevents_source"])
            return BrokerTransport(module.Target, getattr(module, link), descriptors, guard(settings), defaults)

        return make

    return {
        protocol: _checked(protocol, make)
        for protocol, make in {
            "amqp": broker("amqp", "AmqpConnection"),
            "http": http,
            "kafka": broker("kafka", "KafkaConnection"),
            "log": log_lines,
            "mqtt": broker("mqtt", "MqttConnection"),
            "nats": broker("nats", "NatsConnection"),
            "redis": broker("redis", "RedisConnection"),
        }.items()
    }


def _checked(protocol: str, make: MakeTransport) -> MakeTransport:
    def checked(descriptors: Descriptors) -> Transport:
        package = missing_client(protocol)
        if package is not None:
            raise ConfigError(f"{package} isn't installed where the worker runs, and protocol {protocol} needs it")
        return make(descriptors)

    return checked
