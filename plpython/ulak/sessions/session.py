"""What database.py needs of a session: the backend that a worker runs in (backend.py), or a node's connection to it
(node/session.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ulak.worker.wake_up import WakeUp

Rows = Sequence[Mapping[str, Any]]

CANCELLED = "57014"


class Cancelled(BaseException):
    """The statement was cancelled, and with it the run. No Exception: what contains the harm that a message does
    (bulkhead.py) must not contain this. Its cause is the session's own error, which leaves the run in its place."""


@contextmanager
def cancellable() -> Iterator[None]:
    """Around a run: a cancel leaves it as the session's own error."""
    try:
        yield
    except Cancelled as cancelled:
        assert cancelled.__cause__ is not None
        raise cancelled.__cause__ from None


class Session(Protocol):
    # The exception of a failed statement, with its sqlstate. A cancel is raised as Cancelled.
    Error: type[Exception]

    def call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        """A statement with its parameters as $1, $2 and so on: one transaction, which is over when this returns. What
        fails is undone, and so is what can't be read."""

    def check_interrupts(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def wake_up(self) -> WakeUp | None:
        """How a notification reaches this session, if there is a way. The caller closes it."""

    def orders(self) -> str | None:
        """The order to leave that the process itself got, as in port.Orders.leave; None: none."""

    def now(self) -> float:
        """The time by the server's clock, wherever this runs, in seconds since 1970."""

    def measure_clock(self) -> float | None:
        """Compares this machine's clock with the server's: by how many seconds it is ahead; None if it is the same."""

    def warn(self, line: str) -> None:
        """Logs a line for the operator."""
