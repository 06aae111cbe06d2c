"""Deliveries without a worker: the parts that never wait, and a wait for them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ulak.messages.delivery import Endpoint, EndpointConfig, Message, Settled
from ulak.safety.address import Guard
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.http.client import Client
from ulak.transports.http.model import Endpoint as Receiver
from ulak.transports.http.model import Finished, Profile, Request
from ulak.transports.http.transport import HttpTransport, longest
from ulak.transports.transport import Descriptors, Ready, Transport

from support.sessions import PATIENCE, wait_until

# Of ulak.settings, those that transports are made with; they may dial loopback. A test of a time-out sets its own.
SETTINGS = {
    "capture_response": "false",
    "cloudevents_source": "/ulak",
    "http_allow_internal_urls": "true",
    "http_allowed_hosts": "",
    "http_allowed_networks": "",
    "http_connect_timeout": str(PATIENCE),
    "http_timeout": str(PATIENCE),
    "response_body_max_size": "65536",
}


class Stepping(Protocol):
    @property
    def in_flight(self) -> int: ...

    def step(self, max_wait: float) -> list[Settled]: ...


def settle_all(deliveries: Stepping) -> list[Settled]:
    """Goes on until nothing is in flight."""
    settled: list[Settled] = []

    def is_done() -> bool:
        if deliveries.in_flight:
            settled.extend(deliveries.step(0.1))
        return not deliveries.in_flight

    wait_until(is_done, "the end of all that is in flight", interval=0)
    return settled


def patient(url: str, **options: Any) -> Profile:
    """With as much time as a busy machine may need."""
    return Profile(url, **{"timeout": PATIENCE, "connect_timeout": PATIENCE, **options})


class Exchanges:
    """HTTP exchanges: start() some, step() until they have ended."""

    def __init__(self, guard: Guard, max_connections: int = 256) -> None:
        self.descriptors = Descriptors()
        self.client = Client(guard, self.descriptors, max_connections)

    @property
    def in_flight(self) -> int:
        return self.client.in_flight

    def start(self, request: Request) -> None:
        self.client.start(request)

    def step(self, max_wait: float) -> list[Finished]:
        finished: list[Finished] = []
        left = self.client.timeout()
        if left == 0:
            finished += self.client.advance(())
            left = self.client.timeout()
        if not self.in_flight:
            return finished
        if ready := self.wait(0 if finished else max_wait if left is None else min(max_wait, left)):
            finished += self.client.advance(ready)
        return finished

    def wait(self, seconds: float) -> Ready:
        poll = select.poll()
        poll.register(self.descriptors, select.POLLIN)
        poll.poll(seconds * 1000)
        return self.descriptors.ready()

    def close(self) -> None:
        self.client.close()
        self.descriptors.close()


def worker_endpoint(receiver: Receiver) -> Endpoint:
    """As HttpTransport.parse() makes it."""
    return receiver.config.parsed(receiver.batch_size, longest(receiver), receiver)


class Deliveries:
    """Deliveries over HTTP: send() some, step() until they are settled."""

    def __init__(self, guard: Guard | None = None, clock: Callable[[], float] = time.time) -> None:
        """May dial loopback, unless a guard forbids it."""

        def make(descriptors: Descriptors) -> Transport:
            return HttpTransport(Client(guard or Guard(allow_internal=True), descriptors), clock)

        self.dispatcher = Dispatcher({"http": make})
        # With its first endpoint the transport is made.
        self.dispatcher.parse(EndpointConfig(0, "first", 1, {"url": "http://127.0.0.1/"}))

    @property
    def in_flight(self) -> int:
        return self.dispatcher.in_flight

    def send(self, receiver: Receiver, messages: Sequence[Message]) -> None:
        self.dispatcher.start(worker_endpoint(receiver), messages)

    def step(self, max_wait: float) -> list[Settled]:
        return self.dispatcher.step(max_wait)

    def close(self) -> None:
        self.dispatcher.close()
