"""The transports that a worker has, by protocol. Who adds one adds it here and to ulak._worker_protocols()."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ulak.worker.dispatcher import MakeTransport
from ulak.worker.transport import Transport
from ulak.worker.waiting import Descriptors


def transports(
    settings: Mapping[str, str], version: str, max_in_flight: int, log: Callable[[str], object]
) -> Mapping[str, MakeTransport]:
    """`settings` are those of ulak.settings; log() writes a line to the server's log."""

    def http(descriptors: Descriptors) -> Transport:
        from ulak.http import options
        from ulak.http.client import Client
        from ulak.http.transport import HttpTransport

        client = Client(options.guard(settings), descriptors, max_in_flight)
        return HttpTransport(client, options.endpoint_settings(settings, version))

    def log_lines(descriptors: Descriptors) -> Transport:
        from ulak.log.transport import LogTransport

        return LogTransport(log)

    return {"http": http, "log": log_lines}
