"""The transports that a worker has, by protocol. Who adds one adds it here and to ulak._worker_protocols()."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from ulak.address import guard
from ulak.delivery import ConfigError
from ulak.worker.dispatcher import MakeTransport
from ulak.worker.transport import Transport
from ulak.worker.waiting import Descriptors

# Python's module, and Debian's package of it. Only those who deliver over a protocol need its client.
CLIENTS: Mapping[str, tuple[str, str]] = {
    "amqp": ("pika", "python3-pika"),
    "http": ("pycurl", "python3-pycurl"),
    "kafka": ("confluent_kafka", "python3-confluent-kafka"),
    "mqtt": ("paho", "python3-paho-mqtt"),
    "redis": ("redis", "python3-redis"),
}


def missing_client(protocol: str) -> str | None:
    """The package that has to be installed before a worker can deliver over this protocol."""
    module, package = CLIENTS.get(protocol, (None, None))
    return package if module is not None and find_spec(module) is None else None


def transports(
    settings: Mapping[str, str],
    version: str,
    max_in_flight: int,
    log: Callable[[str], object],
    now: Callable[[], float],
) -> Mapping[str, MakeTransport]:
    """`settings` are those of ulak.settings; log() writes a line to the server's log; now() is the server's time."""

    def http(descriptors: Descriptors) -> Transport:
        from ulak.http import options
        from ulak.http.client import Client
        from ulak.http.transport import HttpTransport

        client = Client(guard(settings), descriptors, max_in_flight)
        return HttpTransport(client, now, options.endpoint_settings(settings, version))

    def kafka(descriptors: Descriptors) -> Transport:
        from ulak.kafka.transport import KafkaTransport

        return KafkaTransport(descriptors, guard(settings), settings["cloudevents_source"])

    def log_lines(descriptors: Descriptors) -> Transport:
        from ulak.log.transport import LogTransport

        return LogTransport(log)

    def amqp(descriptors: Descriptors) -> Transport:
        from ulak.amqp.transport import AmqpTransport

        timeout, source = float(settings["http_timeout"]), settings["cloudevents_source"]
        return AmqpTransport(descriptors, guard(settings), version, timeout, source)

    def mqtt(descriptors: Descriptors) -> Transport:
        from ulak.mqtt.transport import MqttTransport

        timeout, source = float(settings["http_timeout"]), settings["cloudevents_source"]
        return MqttTransport(descriptors, guard(settings), timeout, source)

    def redis(descriptors: Descriptors) -> Transport:
        from ulak.redis.transport import RedisTransport

        return RedisTransport(descriptors, guard(settings))

    return {
        protocol: _checked(protocol, make)
        for protocol, make in {
            "amqp": amqp,
            "http": http,
            "kafka": kafka,
            "log": log_lines,
            "mqtt": mqtt,
            "redis": redis,
        }.items()
    }


def _checked(protocol: str, make: MakeTransport) -> MakeTransport:
    def checked(descriptors: Descriptors) -> Transport:
        package = missing_client(protocol)
        if package is not None:
            raise ConfigError(f"{package} isn't installed where the worker runs, and protocol {protocol} needs it")
        return make(descriptors)

    return checked
