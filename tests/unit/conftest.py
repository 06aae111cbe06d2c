"""Real sockets on loopback, and short ways to make endpoints, messages and transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.deliveries import SETTINGS, Deliveries, Exchanges
from support.sessions import PATIENCE
from support.stage import Stage
from ulak.messages.delivery import EndpointConfig
from ulak.safety.address import Guard
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.http import endpoint
from ulak.transports.http.model import Endpoint, Message, Settings
from ulak.transports.registry import transports

MakeEndpoint = Callable[..., Endpoint]
MakeMessage = Callable[..., Message]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers get as much time as a busy machine may need. A test of a time-out sets its own."""
    for name in ("broker.target.CONNECT_TIMEOUT", "redis.target.CONNECT_TIMEOUT", "redis.target.COMMAND_TIMEOUT"):
        monkeypatch.setattr(f"ulak.transports.{name}", float(PATIENCE))
    monkeypatch.setattr("ulak.transports.kafka.target.MESSAGE_TIMEOUT", float(PATIENCE))


@pytest.fixture
def exchanges() -> Iterator[Exchanges]:
    """May dial loopback, which the tests need."""
    exchanges = Exchanges(Guard(allow_internal=True))
    yield exchanges
    exchanges.close()


@pytest.fixture
def deliveries() -> Iterator[Deliveries]:
    """May dial loopback, too."""
    deliveries = Deliveries()
    yield deliveries
    deliveries.close()


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    """All transports, which may dial loopback."""
    dispatcher = Dispatcher(transports(SETTINGS, "1.0", 8, print, time.time))
    yield dispatcher
    dispatcher.close()


@pytest.fixture
def make_endpoint() -> MakeEndpoint:
    def make(
        url: str = "http://127.0.0.1/", settings: Settings | None = None, secrets: Any = (), **config: Any
    ) -> Endpoint:
        given = {"url": url, "timeout": PATIENCE, "connect_timeout": PATIENCE, **config}
        return endpoint.parse(EndpointConfig(1, "orders", 1, given, secrets), settings)

    return make


@pytest.fixture
def make_message() -> MakeMessage:
    def make(number: int = 1, payload: str = '{"order": 1}', **fields: Any) -> Message:
        return Message(number, f"0190a5d2-5b9e-7000-8000-{number:012d}", fields.pop("attempt", 1), payload, **fields)

    return make


@pytest.fixture
def stage() -> Stage:
    return Stage()
