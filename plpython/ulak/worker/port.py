"""The worker's interface to the database, so that its loop runs in tests without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ulak.messages.delivery import EndpointConfig, Message
from ulak.worker.wake_up import WakeUp


class Busy(Exception):
    """The database can't do it now: a lock is taken, a deadlock was broken, a disk is full. Nothing was changed."""


class Refused(Exception):
    """The database won't do it, now or later, because of what it was given. Nothing was changed."""


class Claimed(NamedTuple):
    """The messages that a claim got of one endpoint, and the version of its config."""

    endpoint_id: int
    config_version: int
    messages: list[Message]
    # The claim got as many as it asked for.
    may_have_more: bool = False


class Orders(NamedTuple):
    """The answer to a worker that asks whether to go on."""

    # "stop": leave at once; "restart": leave in good order, another run will follow; None: go on.
    leave: str | None
    # All changed settings as one text: when it differs, the worker starts a new run.
    settings: str


class Outcomes(NamedTuple):
    """Settled messages in their order of arrival, column by column; a column of nothing but None is None."""

    ids: Sequence[int]
    attempts: Sequence[int]
    errors: Sequence[str | None] | None = None
    retry_after: Sequence[int | None] | None = None
    responses: Sequence[str | None] | None = None
    # Outcomes with the same number came from one request, for the circuit breaker; None: each from its own.
    requests: Sequence[int] | None = None


class Wish(NamedTuple):
    """Limits of a claim: how many messages in all, of some endpoints (rooms), and of each other one (room)."""

    most: int
    rooms: Mapping[int, int]
    room: int
    # Only new messages, with ids above this one; None: all due messages.
    behind: int | None = None
    # If nothing is new, claim any due messages.
    is_for_all: bool = True
    # Only of these endpoints; None: of all in turn, with at most most_visits.
    endpoint_ids: Sequence[int] | None = None
    most_visits: int = 1000


class Turn(NamedTuple):
    """The result of a turn."""

    claimed: Sequence[Claimed]
    # There may be due messages that the claim didn't get to.
    left_out_others: bool
    # The id that a sender drew last, as of before the claim.
    last_sent: int
    # Senders up to this id notify, if that was asked for.
    notified_to: int | None = None
    # The claim was for all due messages, and no message is waiting, not even for a later time.
    is_empty: bool = False


class Database(Protocol):
    """No transaction is open when a method returns. A turn is one transaction, unless a claimed text has to be read
    separately. Each method may raise Busy or Refused."""

    def turn(self, outcomes: Outcomes | None, wish: Wish | None, lease: float, wake_ups: bool) -> Turn:
        """Settles, then claims. wake_ups asks the next senders to notify."""

    def settle(self, outcomes: Outcomes) -> None: ...

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        """Looks every interval, for at most this many seconds, until the id that a sender drew last isn't last_sent;
        returns that id."""

    def check_interrupts(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]: ...

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None: ...

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        """Returns the ids that are still held."""

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        """Of these endpoints, those that must not be sent to now, and why: open, half_open or disabled."""

    def check(self) -> Orders:
        """Whether to go on."""

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        """A sign of life with the counters since the last one."""

    def sweep(self) -> None:
        """Recovers messages of dead workers and marks expired ones, unless another worker is doing it."""

    def is_poller(self) -> bool:
        """Whether this is the worker that is notified of new messages, or looks often; the others look less often."""

    def listen(self) -> WakeUp | None:
        """The wake-up by which senders reach the worker, if the session supports one."""

    def unlisten(self) -> None: ...
