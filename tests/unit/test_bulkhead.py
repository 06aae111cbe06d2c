"""An error in a transport does no more harm than it has to: each function that a delivery runs raises once.

The functions are found by running deliveries: a new transport or a new parser is covered without being listed here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from uuid import uuid4

import pytest
from support import brokers
from support.deliveries import SETTINGS, settle_all
from support.receiver import Answer, Received, Receiver
from support.sessions import PATIENCE, strain
from ulak.messages import bulkhead
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message, Settled
from ulak.transports import dispatcher
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.registry import transports

ULAK = Path(bulkhead.__file__).parents[1]
# The loop, the seam, the values that cross it, and what is run once for all deliveries.
BEFORE = {
    *("worker", "node", "report", "messages/bulkhead.py", "messages/delivery.py"),
    *("transports/dispatcher.py", "transports/transport.py", "transports/registry.py", "transports/broker/delivery.py"),
}
# What all deliveries of a transport go through. Where one of these raises, the transport is given up.
SHARED = {
    *("HttpTransport.__init__", "HttpTransport.advance", "HttpTransport.timeout", "Client.__init__"),
    *("Client.advance", "Client.timeout", "Client._advance", "Client._collect"),
    *("LogTransport.__init__", "LogTransport.advance", "LogTransport.timeout"),
    *("BrokerTransport.__init__", "BrokerTransport.advance", "BrokerTransport.timeout", "Link.guarded"),
}

# Time for a delivery over loopback. A delivery that an error leaves without an answer takes all of it, so there is little, and where
# that was too little on a busy machine, plenty.
LITTLE, PLENTY = 0.3, PATIENCE / 4


class Fault(Exception):
    """What no code expects."""


@dataclass
class Scenario:
    protocol: str
    config: dict[str, Any]
    # Of each delivery.
    fields: Sequence[dict[str, Any]] = ({},)
    signing_secrets: Sequence[str] = ()
    captures: bool = False
    # Those of deliveries that nothing went wrong with.
    expected: set[str | None] = field(default_factory=lambda: {None})

    def timed(self, seconds: float) -> dict[str, Any]:
        """The config, with this much time for a delivery."""
        if self.protocol == "log":
            return self.config
        return {**self.config, **brokers.patience(self.protocol, seconds)}


def accepts(request: Received) -> Answer:
    if request.path == "/token":
        return Answer(body=b'{"access_token": "t", "expires_in": 3600}')
    if request.path == "/busy":
        return Answer(503, {"Retry-After": "7"}, b"busy")
    if request.path == "/some":
        return Answer(207, body=json.dumps({"failed": [{"index": 0, "error": "no"}]}).encode())
    return Answer(201, {"X-Id": "1"}, b"taken")


METADATA = '{"event_type": "a", "place": "b"}'
RICH = {
    "headers": '{"x-own": "1", "traceparent": "00-1", "content-type": "application/json"}',
    "metadata": METADATA,
    "correlation_id": "0190a5d2-5b9e-7000-8000-00000000000a",
    "ordering_key": "k",
    "created_at": "2026-01-01 00:00:00+00",
}
RAW = {"payload": '"text"', "metadata": METADATA, "headers": '{":body": "raw", "content-type": "text/plain"}'}

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
SIGV4 = {"type": "aws_sigv4", "access_key": "a", "secret_key": "secret", "region": "eu-west-1", "service": "sqs"}
HTTP: dict[str, dict[str, Any]] = {
    "plain": {"signing_secrets": [SECRET]},
    "rich": {
        "fields": [RICH, RAW],
        "captures": True,
        "config": {"auth": {"type": "bearer", "token": "abcdef"}},
    },
    "events": {"fields": [RICH, RAW], "config": {"cloudevents": True}, "signing_secrets": [SECRET]},
    "structured": {"fields": [RICH, RAW], "config": {"cloudevents": True, "cloudevents_mode": "structured"}},
    "batch": {"fields": [RICH, RICH], "config": {"batch_size": 10, "batch_format": "cloudevents"}},
    "envelope": {"fields": [RICH, {}], "config": {"batch_size": 10, "batch_format": "envelope"}},
    "busy": {"path": "/busy", "captures": True, "expected": {"[RETRYABLE] HTTP 503: busy"}},
    "some": {"path": "/some", "captures": True, "config": {"batch_size": 10}},
    "oauth2": {"config": {"auth": {"type": "oauth2", "client_id": "a", "client_secret": "secret"}}},
    "sigv4": {"config": {"auth": SIGV4}},
}
NAMES = [
    *(f"http-{name}" for name in HTTP),
    "log",
    *brokers.PROTOCOLS,
    *(f"{name}-events" for name in brokers.PROTOCOLS),
]


@pytest.fixture(params=NAMES)
def scenario(request: pytest.FixtureRequest) -> Iterator[Scenario]:
    protocol, _, kind = request.param.partition("-")
    with ExitStack() as resources:
        if protocol == "http":
            receiver = resources.enter_context(Receiver(accepts))
            given = dict(HTTP[kind])
            config = {"url": receiver.origin + given.pop("path", "/"), **given.pop("config", {})}
            if config.get("auth", {}).get("type") == "oauth2":
                config["auth"] = {**config["auth"], "token_url": receiver.origin + "/token"}
            yield Scenario("http", config, **given)
        elif protocol == "log":
            yield Scenario("log", {}, [RICH])
        else:
            broker = brokers.broker(protocol, request.getfixturevalue, resources)
            config = dict(broker.config)
            if kind:
                place = str(broker.config[broker.route])
                config[broker.route] = place.replace("b", "{place}", 1) if "b" in place else place
            if kind and protocol != "redis":
                config["cloudevents"] = True
            yield Scenario(protocol, config, [RICH, RAW] if kind else [{}])


class Play:
    """Two endpoints of one protocol and one of another, each with a delivery."""

    def __init__(self, scenario: Scenario, seconds: float) -> None:
        self.scenario = scenario
        self.config = scenario.timed(seconds)
        settings = {**SETTINGS, "capture_response": str(scenario.captures).lower()}
        self.dispatcher = Dispatcher(transports(settings, "1.0", 8, lambda line: None, time.time))
        # By endpoint: an error, or None for what was delivered. Only the first message of a batch may have been refused.
        self.outcomes: dict[int, str | None] = {}
        self._next = 1

    def deliver(self) -> None:
        started = 0
        for endpoint_id, protocol in ((1, self.scenario.protocol), (2, self.scenario.protocol), (3, "log")):
            try:
                endpoint = self._parse(endpoint_id, protocol)
            except ConfigError as error:
                self.outcomes[endpoint_id] = f"config: {error}"
                continue
            for messages in self.dispatcher.group(endpoint, self._messages()):
                started += 1
                self.dispatcher.start(endpoint, messages)
        settled = settle_all(self.dispatcher)
        assert len(settled) == started
        for each in settled:
            self._note(each)

    def _parse(self, endpoint_id: int, protocol: str) -> Endpoint:
        config = self.config if protocol == self.scenario.protocol else {}
        if "client_id" in config.get("auth", {}):
            # Endpoints with the same credentials would share their token.
            config = {**config, "auth": {**config["auth"], "client_id": f"client-{endpoint_id}"}}
        secrets = self.scenario.signing_secrets if protocol == "http" else ()
        return self.dispatcher.parse(EndpointConfig(endpoint_id, "orders", 1, config, secrets, (), protocol))

    def _messages(self) -> list[Message]:
        messages = []
        for fields in self.scenario.fields:
            number, self._next = self._next, self._next + 1
            messages.append(Message(number, str(uuid4()), 1, **{"payload": "{}", **fields}))
        return messages

    def _note(self, settled: Settled) -> None:
        error = settled.outcome.error
        if settled.outcome.failures and settled.outcome.status != 207:
            error = next(iter(settled.outcome.failures.values())).error
        if self.outcomes.get(settled.endpoint_id) is None:
            self.outcomes[settled.endpoint_id] = error


@contextmanager
def traced(trace: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Of all threads that are started meanwhile, too."""
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def is_behind_the_seam(code: CodeType) -> bool:
    path = Path(code.co_filename)
    if ULAK not in path.parents:
        return False
    within = path.relative_to(ULAK)
    return within.parts[0] not in BEFORE and str(within) not in BEFORE


def functions(scenario: Scenario) -> list[CodeType]:
    """All that run in this scenario."""
    found: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        found[frame.f_code] += 1

    play = Play(scenario, PLENTY)
    with traced(note):
        play.deliver()
    play.dispatcher.close()
    assert play.outcomes == {1: play.outcomes[1], 2: play.outcomes[1], 3: None}
    assert play.outcomes[1] in scenario.expected
    # A copy: threads of a transport may still be running.
    return sorted(filter(is_behind_the_seam, list(found)), key=lambda code: (code.co_filename, code.co_firstlineno))


def problems(scenario: Scenario, code: CodeType, seconds: float) -> list[str]:
    """Of a delivery in which this function raises once, and of the next one."""
    has_raised = False

    def fail(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal has_raised
        if frame.f_code is code and not has_raised:
            has_raised = True
            raise Fault

    play = Play(scenario, seconds)
    with traced(fail):
        play.deliver()
    first = dict(play.outcomes)
    play.outcomes.clear()
    play.deliver()
    play.dispatcher.close()

    found = []
    harmed = [id for id, error in first.items() if error not in ({None} if id == 3 else scenario.expected)]
    if len(harmed) > 1 and code.co_qualname.partition(".<")[0] not in SHARED:
        found.append(f"it harms several endpoints: {first}")
    if not {play.outcomes[1], play.outcomes[2]} <= scenario.expected or play.outcomes[3] is not None:
        found.append(f"the next delivery fails: {play.outcomes}")
    return found


# In threads that were told to raise, and by objects that were never finished.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_raises_in_a_transport_harms_one_endpoint_at_most_and_the_next_delivery_arrives(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "OVERDUE_SECONDS", 0.5)
    for code in functions(scenario):
        found = problems(scenario, code, LITTLE * strain()) and problems(scenario, code, PLENTY)

        assert found == [], f"{code.co_qualname} in {code.co_filename}:{code.co_firstlineno}"


def test_a_callback_for_a_c_library_answers_instead_of_raising() -> None:
    assert bulkhead.contained(lambda number: 10 // number, 7)(5) == 2
    assert bulkhead.contained(lambda number: 10 // number, 7)(0) == 7


def test_a_delivery_that_its_transport_loses_is_worth_another_try() -> None:
    class Losing:
        def parse(self, config: EndpointConfig) -> Endpoint:
            return config.parsed(1, 60, None)

        def start(self, *_: object) -> None:
            pass

        def timeout(self) -> None:
            return None

        def close(self) -> None:
            pass

    now = 0.0
    dispatcher = Dispatcher({"losing": lambda _: Losing()}, lambda: now)  # type: ignore[dict-item,arg-type,return-value]
    message = Message(1, str(uuid4()), 1, "{}")
    dispatcher.start(dispatcher.parse(EndpointConfig(7, "orders", 1, {}, protocol="losing")), [message])

    now = 60.0
    before = dispatcher.step(0)
    now = 66.0
    after = dispatcher.step(0)

    assert (before, dispatcher.in_flight) == ([], 0)
    assert [(each.endpoint_id, each.messages, each.outcome.error) for each in after] == [
        (7, [message], "[RETRYABLE] worker: the transport has lost the delivery")
    ]
    dispatcher.close()
