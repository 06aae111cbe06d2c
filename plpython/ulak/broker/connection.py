"""A connection to a broker: from dialling it to losing it. What is said over it is the protocol's."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ulak import text
from ulak.address import Guard
from ulak.broker.delivery import Delivery
from ulak.broker.dial import Descriptors, Dial, DialError
from ulak.delivery import PERMANENT, RETRYABLE, ConfigError, Endpoint, MessageError, Settled
from ulak.mask import Mask
from ulak.worker.waiting import READABLE, WRITABLE

_READ_AT_ONCE = 256 * 1024


class Surroundings(NamedTuple):
    """What a connection needs of its transport."""

    descriptors: Descriptors
    guard: Guard
    clock: Callable[[], float]
    # Where a delivery that has ended is put.
    settled: list[Settled]


class Address(NamedTuple):
    host: str
    port: int
    # Makes the context of TLS, anew for each connection since files change; raises ConfigError.
    tls: Callable[[], ssl.SSLContext] | None = None


class Lost(Exception):
    """Raised by a protocol: the connection can't be used any longer."""

    def __init__(self, problem: str, prefix: str = RETRYABLE) -> None:
        super().__init__(problem)
        self.prefix = prefix


class Connection(ABC):
    """Deliveries wait until the protocol calls open(); each is then given to send(), and is settled one message at a
    time. A connection that doesn't answer in time is lost, with all that is under way over it: nobody could tell any
    more which answer is whose.

    Whatever the protocol raises is the connection's end, and reaches nobody else.
    """

    def __init__(
        self, endpoint: Endpoint, address: Address, mask: Mask, connect_timeout: float, surroundings: Surroundings
    ) -> None:
        self.endpoint = endpoint
        self.mask = mask
        self.is_open = False
        self.is_lost = False
        self._has_left = False
        # By what.
        self._end = ""
        self._surroundings = surroundings
        self._clock = surroundings.clock
        self._address = address
        self._waiting: deque[Delivery] = deque()
        # In the order of their deadlines.
        self._under_way: dict[Delivery, None] = {}
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._is_writing = False
        self._opens_until = self._clock() + connect_timeout
        self._dial: Dial | None = None
        self._guarded(self._begin)

    # What a protocol is made of.

    @abstractmethod
    def connected(self) -> None:
        """The socket is there: greet the broker, and call open() when it has taken the greeting."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Bytes of the broker's. May raise Lost."""

    @abstractmethod
    def send(self, delivery: Delivery) -> None:
        """Writes its messages, and remembers whose answers they are. MessageError of one of them is for reject()."""

    def timer(self) -> float | None:
        """When timer_passed() is to be called."""
        return None

    def timer_passed(self) -> None:  # noqa: B027 - most have no timer
        """Such as for a heartbeat."""

    def why_slow(self) -> str | None:
        """What the broker has said about it, for the error of what isn't acknowledged in time."""
        return None

    def farewell(self) -> bytes:
        """What the broker would like to hear before the connection is closed."""
        return b""

    # What a protocol may call.

    def open(self) -> None:
        self.is_open = True
        while self._waiting and not self.is_lost:
            delivery = self._waiting.popleft()
            self._under_way[delivery] = None
            self._send(delivery)

    def hold(self, seconds: float | None) -> None:
        """The broker takes no messages until open() is called again, which is awaited for so long; None: as long as
        deliveries wait."""
        self.is_open = False
        self._opens_until = math.inf if seconds is None else self._clock() + seconds

    def write(self, data: bytes) -> None:
        self._unsent += data

    def settle(self, delivery: Delivery) -> None:
        """To be called after its last message was given an outcome; before that it does nothing."""
        if delivery.is_settled and delivery in self._under_way:
            del self._under_way[delivery]
            self._surroundings.settled.append(delivery.settled())

    def error(self, prefix: str, told: str) -> str:
        """One line, without what nobody may read."""
        return f"{prefix} {text.line(self.mask.hide(told))}"

    @property
    def peer(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    # What the transport calls.

    @property
    def is_idle(self) -> bool:
        return not self._under_way and not self._waiting

    def deliver(self, delivery: Delivery) -> None:
        if self.is_lost:
            delivery.fail_the_rest(self._end)
            self._surroundings.settled.append(delivery.settled())
        elif self.is_open:
            self._under_way[delivery] = None
            self._guarded(lambda: self._send(delivery))
            self._guarded(self._flush)
        else:
            self._waiting.append(delivery)

    def next_deadline(self) -> float | None:
        times = [self.timer(), None if self.is_open else self._opens_until]
        if self._dial is not None:
            times.append(self._dial.next_deadline())
        first = next(iter(self._under_way), None) or (self._waiting[0] if self._waiting else None)
        if first is not None:
            times.append(first.deadline)
        return min((each for each in times if each is not None), default=None)

    def advance(self, events: int) -> None:
        """One of its descriptors is ready."""
        self._guarded(lambda: self._advance(events))

    def pass_time(self) -> None:
        """next_deadline() has come."""
        self._guarded(self._pass_time)

    def lose(self, problem: str, prefix: str = RETRYABLE) -> None:
        """All that is under way or waits has failed, unless the broker has acknowledged it."""
        self.close()
        self._end = self.error(prefix, problem)
        for delivery in (*self._under_way, *self._waiting):
            delivery.fail_the_rest(self._end)
            self._surroundings.settled.append(delivery.settled())
        self._under_way.clear()
        self._waiting.clear()

    def close(self) -> None:
        self.is_open = False
        self.is_lost = True
        if self._dial is not None:
            self._dial.close()
            self._dial = None
        if self._socket is not None:
            self._surroundings.descriptors.forget(self._socket.fileno())
            if not self._has_left:
                self.leave()
            self._socket.close()
            self._socket = None

    def leave(self) -> int | None:
        """Says farewell; the descriptor on which the broker answers, if it does. Nothing else may be said after it."""
        self._has_left = True
        last = self.farewell()
        if self._socket is None or not last or self._unsent:
            return None
        # If it can't be written at once, the broker has to do without.
        with contextlib.suppress(OSError):
            self._socket.send(last)
            return self._socket.fileno()
        return None

    def _begin(self) -> None:
        where = self._address
        context = None if where.tls is None else where.tls()
        around = self._surroundings
        self._dial = Dial(
            around.descriptors, around.guard, where.host, where.port, context, self._opens_until, self._clock
        )

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.is_lost:
            return
        try:
            step()
        except (DialError, Lost) as error:
            self.lose(str(error), error.prefix)
        except ConfigError as error:
            self.lose(f"config: {error}")
        except OSError as error:
            told = os.strerror(error.errno) if error.errno else type(error).__name__
            # What the broker acknowledged before it left is delivered, though nobody has looked yet.
            with contextlib.suppress(Exception):
                self._read()
            self.lose(f"network: {self.peer}: {told}")
        # Whatever a broker does to our code, the others' deliveries must go on. Its text might quote a secret.
        except Exception as error:
            self.lose(f"network: {self.peer}: the answer can't be read: {type(error).__name__}")

    def _send(self, delivery: Delivery) -> None:
        self.send(delivery)
        self.settle(delivery)

    def reject(self, delivery: Delivery, index: int, error: MessageError) -> None:
        """A message that can't be sent as it is."""
        delivery.fail(delivery.messages[index], self.error(PERMANENT, str(error)))

    def _advance(self, events: int) -> None:
        if self._dial is not None:
            made = self._dial.advance()
            if made is None:
                return
            self._dial = None
            self._socket = made
            self._watch()
            self.connected()
        elif events & ~WRITABLE:
            self._read()
        self._flush()

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_READ_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                raise Lost(f"network: {self.peer} closed the connection")
            self.received(data)
            # TLS may hold more than the kernel tells of.
            if len(data) < _READ_AT_ONCE and not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                return

    def _flush(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            del self._unsent[:sent]
        if self._is_writing != bool(self._unsent):
            self._watch()

    def _watch(self) -> None:
        if self._socket is not None:
            self._is_writing = bool(self._unsent)
            events = READABLE | WRITABLE if self._is_writing else READABLE
            self._surroundings.descriptors.watch(self._socket.fileno(), events)

    def _pass_time(self) -> None:
        now = self._clock()
        if self._dial is not None and now >= self._dial.next_deadline():
            self._advance(0)
        # What has come while the worker was busy elsewhere counts.
        self._read()
        first = next(iter(self._under_way), None) or (self._waiting[0] if self._waiting else None)
        if first is not None and now >= first.deadline:
            why = self.why_slow()
            doing = "no acknowledgement" if self._under_way or why else "no connection"
            raise Lost(f"timeout: {doing} from {self.peer} in time" + (f": {why}" if why else ""))
        if not self.is_open and now >= self._opens_until:
            raise Lost(f"timeout: no connection to {self.peer} in time")
        timer = self.timer()
        if timer is not None and now >= timer:
            self.timer_passed()
        self._flush()
