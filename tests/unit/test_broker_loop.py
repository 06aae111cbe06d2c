"""Whatever a broker does or leaves undone, the worker's loop goes on: nothing holds it up for more than 100 ms."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.brokers import PROTOCOLS, Broker, broker, patience
from support.receiver import Receiver
from ulak.messages.delivery import Endpoint, EndpointConfig, Message
from ulak.transports.broker.transport import FAREWELL_SECONDS
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.registry import transports

SETTINGS = {
    "capture_response": "false",
    "cloudevents_source": "/ulak",
    "http_allow_internal_urls": "true",
    "http_allowed_hosts": "",
    "http_allowed_networks": "",
    "http_connect_timeout": "5",
    "http_timeout": "10",
    "response_body_max_size": "65536",
}
LONGEST = 0.1
# A wait that is in the code is there each time; one that the machine's load makes is not.
TRIES = 5


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


@pytest.fixture(params=PROTOCOLS)
def at_hand(request: pytest.FixtureRequest, resources: ExitStack) -> Broker:
    return broker(request.param, request.getfixturevalue, resources)


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield listening.getsockname()[1]


class Calls:
    """How long calls of the loop take: in the processor or asleep, but not waiting for a processor."""

    def __init__(self) -> None:
        self.longest = 0.0

    def __call__(self, call: Callable[[], Any]) -> Any:
        began, waited = time.monotonic(), _waited()
        result = call()
        self.longest = max(self.longest, time.monotonic() - began - (_waited() - waited))
        return result


def _waited() -> float:
    """Seconds in which this thread could have run and others did."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def message(number: int) -> Message:
    return Message(number, f"0190a5d2-5b9e-7000-8000-{number:012d}", 1, f'{{"n": {number}}}')


def parse(dispatcher: Dispatcher, protocol: str, config: dict[str, Any], id: int = 7) -> Endpoint:
    return dispatcher.parse(EndpointConfig(id, protocol, 1, config, protocol=protocol))


def begin(dispatcher: Dispatcher, endpoint: Endpoint, deliveries: int, calls: Calls | None = None) -> None:
    """Each as large as this protocol has them. No two endpoints have a message in common."""
    size, first = endpoint.batch_size, 1_000_000 * (endpoint.id + 1)
    for n in range(deliveries):
        start = partial(dispatcher.start, endpoint, [message(first + n * size + each) for each in range(size)])
        (calls or Calls())(start)


@pytest.mark.parametrize("where", ["silent", "hanging", "up"])
def test_nothing_holds_the_worker_up(at_hand: Broker, silent: int, where: str) -> None:
    config = {**(at_hand.at(silent) if where == "silent" else at_hand.config), **patience(at_hand.protocol, 1)}

    def longest() -> tuple[float, float]:
        dispatcher = Dispatcher(transports(SETTINGS, "1.0", 8, print, time.time))
        endpoint = parse(dispatcher, at_hand.protocol, config)
        calls, end = Calls(), Calls()
        if where == "hanging":
            begin(dispatcher, endpoint, 1)
            while dispatcher.in_flight:
                dispatcher.step(0.1)
            at_hand.hang()
        begin(dispatcher, endpoint, 30, calls)
        while dispatcher.in_flight:
            calls(lambda: dispatcher.step(0))
            select.select([], [], [], 0.001)
        if where == "hanging":
            # Its end, with something under way.
            begin(dispatcher, endpoint, 1)
        end(dispatcher.close)
        at_hand.go_on()
        return calls.longest, end.longest

    # The end waits until brokers have answered to it, and for no longer than this.
    found: list[tuple[float, float]] = []
    while len(found) < TRIES and not any(loop < LONGEST and end < LONGEST + FAREWELL_SECONDS for loop, end in found):
        found.append(longest())
    assert min(loop for loop, _ in found) < LONGEST
    assert min(end for _, end in found) < LONGEST + FAREWELL_SECONDS


def test_deliveries_of_others_go_on_beside_brokers_that_never_answer(
    silent: int, receiver: Receiver, request: pytest.FixtureRequest, resources: ExitStack
) -> None:
    """All at once. Each has a minute, so a loop that waited for one of them would be noticed."""
    dispatcher = Dispatcher(transports(SETTINGS, "1.0", 8, print, time.time))
    for id, protocol in enumerate(PROTOCOLS):
        at_hand = broker(protocol, request.getfixturevalue, resources)
        config = {**at_hand.at(silent), **patience(protocol, 60)}
        begin(dispatcher, parse(dispatcher, protocol, config, id), 2)
    hanging = dispatcher.in_flight
    http = parse(dispatcher, "http", {"url": receiver.url}, 99)

    delivered = []
    for number in range(50):
        dispatcher.start(http, [message(number)])
        while dispatcher.in_flight > hanging:
            delivered += dispatcher.step(0.1)

    assert len(receiver.requests) == 50
    assert {(each.endpoint_id, each.outcome.error) for each in delivered} == {(99, None)}
    assert dispatcher.in_flight == hanging == 2 * len(PROTOCOLS)
    dispatcher.close()
