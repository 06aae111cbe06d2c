"""A connection to a broker as its transport sees it: deliveries that wait or are in flight until each has ended."""

from __future__ import annotations

import math
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ulak.messages import bulkhead
from ulak.messages.delivery import RETRYABLE, ConfigError, Endpoint, Message, MessageError, Settled
from ulak.safety import text
from ulak.safety.address import Guard
from ulak.transports.broker.background import Background
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.errors import Lost, words
from ulak.transports.broker.target import Target
from ulak.transports.transport import READABLE, Descriptors

# Waiting deliveries are sent for this many seconds before other connections get a turn. Sending 128 deliveries of 100
# messages to Redis or Kafka takes 100 ms.
_TURN_SECONDS = 0.02

Result = TypeVar("Result")


class Surroundings(NamedTuple):
    """The part of a transport that a connection uses."""

    descriptors: Descriptors
    # Which link each descriptor belongs to.
    owners: dict[int, Link]
    guard: Guard
    clock: Callable[[], float]
    # Links append deliveries that have ended.
    settled: list[Settled]
    # ulak's version, for brokers that ask who is connecting.
    version: str


class Link(ABC):
    """A Connection (broker/connection.py) is a link over a socket that we have dialled; Kafka's is one over a client
    library that dials by itself.

    Deliveries wait until the protocol calls open(); then each message is published, and acknowledged or refused.
    A connection that doesn't answer in time is lost, and everything in flight over it has failed: later answers could
    no longer be matched.

    Any exception of the protocol ends this connection and no other. Any exception of encode() fails this message and
    no other.
    """

    target: Target
    # With more links of the protocol than this, idle ones are closed.
    most_links = 200

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        self.endpoint = endpoint
        self.target = endpoint.target
        self.is_open = False
        self.is_lost = False
        self.is_dialled = False
        self._surroundings = surroundings
        self._clock = surroundings.clock
        self._waiting: deque[Delivery] = deque()
        # In the order of their deadlines.
        self._under_way: dict[Delivery, None] = {}
        self._opens_until = self._clock() + self.target.connect_timeout
        # When timer_passed() is to be called; None: never.
        self.timer_at: float | None = None
        # By descriptor: work that runs in a thread, and the method that takes its result.
        self._background: dict[int, tuple[Background[Any], Callable[[Any], object]]] = {}

    # A protocol defines these.

    @property
    @abstractmethod
    def peer(self) -> str:
        """Host and port, for errors."""

    @abstractmethod
    def dial(self) -> None:
        """Starts to connect, when the first delivery waits, and sets is_dialled."""

    @abstractmethod
    def encode(self, message: Message) -> Any:
        """The message as it will be sent. Has no side effects. Raises MessageError."""

    @abstractmethod
    def publish(self, delivery: Delivery, message: Message, encoded: Any) -> None:
        """Sends what encode() returned, and remembers which message the answer will be for."""

    @abstractmethod
    def hear(self) -> None:
        """Handles what the broker has sent by now."""

    def ready(self, events: int) -> None:
        """One of its descriptors is ready, for these events."""
        self.hear()

    def flush(self) -> None:  # noqa: B027 - a client library writes by itself
        """Writes pending output; called after each step."""

    def timer_passed(self) -> None:  # noqa: B027 - some have no timer
        """timer_at has come, for example to write a heartbeat."""

    def why_slow(self) -> str | None:
        """Why the broker delays messages, in its words: for the error of one that isn't acknowledged in time."""
        return None

    def leave(self) -> int | None:
        """Starts to close, and returns a descriptor that becomes readable when it has ended. No deliveries follow."""
        return None

    # A protocol may call these.

    def open(self) -> None:
        self.is_open = True
        self._send_waiting()

    def hold(self, seconds: float | None) -> None:
        """The broker accepts no messages until open() is called again. The link waits this long for it; None: as long
        as deliveries may wait."""
        self.is_open = False
        self._opens_until = math.inf if seconds is None else self._clock() + seconds

    def send(self, delivery: Delivery) -> None:
        for message in delivery.messages:
            self.send_message(delivery, message)

    def send_message(self, delivery: Delivery, message: Message) -> None:
        encoded = self.encoded(delivery, message)
        if encoded is not None:
            self.publish(delivery, message, encoded)

    def encoded(self, delivery: Delivery, message: Message) -> Any:
        """None: encoding failed, for whatever reason, and the message has its outcome."""
        try:
            return self.encode(message)
        except Exception as error:
            delivery.fail(message, text.line(self.target.mask.hide(bulkhead.fault(error, self.encode))))
            return None

    def acknowledge(self, delivery: Delivery, message: Message) -> None:
        """The broker has accepted the message."""
        delivery.succeed(message)
        self.settle(delivery)

    def refuse(self, delivery: Delivery, message: Message, prefix: str, told: str) -> None:
        delivery.fail(message, self.error(prefix, told))
        self.settle(delivery)

    def settle(self, delivery: Delivery) -> None:
        """Does nothing until every message of the delivery has an outcome."""
        if delivery.is_settled and delivery in self._under_way:
            del self._under_way[delivery]
            self._surroundings.settled.append(delivery.settled())

    def check_size(self, size: int, largest: int | None) -> None:
        """Raises MessageError."""
        if largest is not None and size > largest:
            raise MessageError(f"the message is larger than the {largest} bytes that {self.peer} takes")

    def error(self, prefix: str, told: str) -> str:
        """One line, with secrets masked."""
        return f"{prefix} {text.line(self.target.mask.hide(told))}"

    def watch(self, descriptor: int, events: int) -> None:
        self._surroundings.descriptors.watch(descriptor, events)
        self._surroundings.owners[descriptor] = self

    def forget(self, descriptor: int) -> None:
        self._surroundings.descriptors.forget(descriptor)
        self._surroundings.owners.pop(descriptor, None)

    def in_background(self, work: Callable[[], Result], take: Callable[[Result], object]) -> None:
        """Runs blocking work in a thread, and passes its result to take() unless the link is closed first."""
        background = Background(work)
        self._background[background.descriptor] = background, take
        self.watch(background.descriptor, READABLE)

    # The transport calls these.

    @property
    def is_idle(self) -> bool:
        return not self._under_way and not self._waiting

    def deliver(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        if not self.is_open:
            if not self.is_dialled:
                self.guarded(self.dial)
        # If other deliveries wait, they are sent first, in their next turn.
        elif len(self._waiting) == 1:
            self.guarded(self._send_waiting)

    def next_deadline(self) -> float | None:
        if self.is_open and self._waiting:
            return -math.inf
        times = [self.timer_at, None if self.is_open else self._opens_until]
        if (first := self._first()) is not None:
            times.append(first.deadline)
        return min((each for each in times if each is not None), default=None)

    def advance(self, descriptor: int, events: int) -> None:
        """One of its descriptors is ready."""
        background, take = self._background.get(descriptor, (None, None))
        if background is None or take is None:
            self.ready(events)
        elif background.is_done():
            self._drop_background(descriptor)
            # Messages acknowledged until now count as delivered, even if the work failed.
            self.hear()
            take(background.result())

    def pass_time(self) -> None:
        """next_deadline() has come."""
        # Answers that arrived while the worker was busy elsewhere are in time.
        self.hear()
        now = self._clock()
        first = self._first()
        if first is not None and now >= first.deadline:
            why = self.why_slow()
            doing = "no acknowledgement" if self._under_way or why else "no connection"
            raise Lost(f"timeout: {doing} from {self.peer} in time" + (f": {why}" if why else ""))
        if not self.is_open and now >= self._opens_until:
            raise Lost(f"timeout: no connection to {self.peer} in time")
        if self.is_open:
            self._send_waiting()
        if self.timer_at is not None and now >= self.timer_at:
            self.timer_passed()

    def guarded(self, step: Callable[[], Result]) -> Result | None:
        """An exception in a step ends this link and no other."""
        if self.is_lost:
            return None
        try:
            result = step()
            self.flush()
        except Exception as error:
            self.lose(*self._problem(error))
            return None
        return result

    def lose(self, problem: str, prefix: str = RETRYABLE) -> None:
        """Fails everything that waits or is in flight, except what the broker has acknowledged."""
        # Even if the protocol's own clean-up raises, the deliveries must be settled.
        with suppress(Exception):
            self.close()
        self.is_open = False
        self.is_lost = True
        error = self.error(prefix, problem)
        for delivery in (*self._under_way, *self._waiting):
            delivery.fail_the_rest(error)
            self._surroundings.settled.append(delivery.settled())
        self._under_way.clear()
        self._waiting.clear()

    def close(self) -> None:
        self.is_open = False
        self.is_lost = True
        self._drop_background(*self._background)

    def _drop_background(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.forget(descriptor)
            self._background.pop(descriptor)[0].close()

    def _problem(self, error: Exception) -> tuple[str, str]:
        """The text and the prefix for what was raised."""
        if isinstance(error, Lost):
            return str(error), error.prefix
        if isinstance(error, ConfigError):
            return f"config: {error}", RETRYABLE
        if isinstance(error, OSError):
            return self._last_words(error), RETRYABLE
        return f"network: {self.peer}: the answer can't be read: {bulkhead.kind(error)}", RETRYABLE

    def _last_words(self, error: OSError) -> str:
        """Reads what the broker sent before it left: acknowledgements count, and it may have said why it left, for
        example that it wants another certificate when our side of the handshake was already done."""
        told: Exception = error
        try:
            self.hear()
        except (Lost, ssl.SSLError) as last:
            told = error if _is_alert(error) else last
        # Later errors add nothing.
        except Exception:
            pass
        if isinstance(told, Lost):
            return str(told)
        return f"{'tls' if _is_alert(told) else 'network'}: {self.peer}: {words(told)}"

    def _first(self) -> Delivery | None:
        return next(iter(self._under_way), None) or (self._waiting[0] if self._waiting else None)

    def _send_waiting(self) -> None:
        ends = self._clock() + _TURN_SECONDS
        while self._waiting and self.is_open and self._clock() < ends:
            delivery = self._waiting.popleft()
            self._under_way[delivery] = None
            self.send(delivery)
            self.settle(delivery)


def _is_alert(error: Exception) -> bool:
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
