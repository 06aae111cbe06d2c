"""The interface of a session, as database.py needs it: the backend that a worker runs in (backend.py), or a node's
connection to one (node/session.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Rows = Sequence[Mapping[str, Any]]

CANCELLED = "57014"


class Cancelled(BaseException):
    """The statement was cancelled, and with it the run. Not an Exception, so that bulkhead.py, which contains the harm
    of a single message, doesn't catch it. Its cause is the session's own error, which cancellable() raises instead."""


@contextmanager
def cancellable() -> Iterator[None]:
    """Wraps a run: turns Cancelled back into the session's own error."""
    try:
        yield
    except Cancelled as cancelled:
        assert cancelled.__cause__ is not None
        raise cancelled.__cause__ from None


class WakeUp(Protocol):
    """Tells when a sender has committed, by a descriptor that the worker waits for along with answers. The content of a
    notification is never read: its arrival is enough."""

    def fileno(self) -> int:
        """Readable when a wake-up has arrived while it was held back."""

    def hold_back(self) -> None:
        """Keeps wake-ups from now on until take() is called, so that none is missed between a claim and the next
        wait."""

    def take(self) -> bool:
        """Called when the descriptor is readable: whether a notification may have arrived."""

    def let_go(self) -> None:
        """Ends hold_back(): the worker no longer waits for wake-ups."""

    def close(self) -> None: ...


class Session(Protocol):
    # The exception of a failed statement, with its sqlstate. A cancel is raised as Cancelled.
    Error: type[Exception]

    def call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        """Runs a statement with its parameters as $1, $2 and so on, in one transaction, which is over when this
        returns. It is undone if it fails, or if its result can't be read."""

    def check_interrupts(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def wake_up(self) -> WakeUp | None:
        """The wake-up by which notifications reach this session, if it supports one. The caller closes it."""

    def orders(self) -> str | None:
        """An order to leave that the process itself received, as from Database.check(); None: there is none."""

    def now(self) -> float:
        """The time by the server's clock in seconds since 1970, even on another machine."""

    def measure_clock(self) -> float | None:
        """Compares this machine's clock with the server's: by how many seconds it is ahead; None if it is the same."""

    def warn(self, line: str) -> None:
        """Logs a line for the operator."""
