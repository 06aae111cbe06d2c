"""What the worker needs of a database, so that its loop runs in tests without one."""

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
    """What a claim got of one endpoint, and the config that holds for it."""

    endpoint_id: int
    config_version: int
    messages: list[Message]
    # It got all that it was asked for.
    may_have_more: bool = False


class Orders(NamedTuple):
    """What a worker is told when it asks whether to go on."""

    # "stop": leave at once; "restart": leave in good order, another run will follow; None: go on.
    leave: str | None
    # All settings that were changed, as one text: the worker begins anew when it isn't what it was.
    settings: str


class Outcomes(NamedTuple):
    """Settled messages in their order of arrival, column by column; a column of nothing but None is None."""

    ids: Sequence[int]
    attempts: Sequence[int]
    errors: Sequence[str | None] | None
    retry_after: Sequence[int | None] | None
    responses: Sequence[str | None] | None
    # Which came in one request, for the circuit breaker; None: each came in its own.
    requests: Sequence[int] | None = None


class WakeUps(NamedTuple):
    """What was asked for, and what there was at that moment."""

    # Who draws an id up to this one notifies.
    notified_to: int
    # The id that a sender drew last, read after the wake-ups were asked for.
    last_sent: int
    # Whether there is anything that a claim could find, now or later.
    has_pending: bool


class Database(Protocol):
    """No method but commit() ends a transaction. Each may raise Busy or Refused, and the transaction goes on."""

    def commit(self) -> None: ...

    def check_interrupts(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def last_sent(self) -> int:
        """The id that a sender drew last. Cheap: it tells whether a claim may find something new."""

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        """Looks every interval until last_sent() isn't what it was, for at most so many seconds; returns what it is."""

    def claim(
        self,
        limit: int,
        lease: float,
        rooms: Mapping[int, int],
        room: int,
        endpoint_ids: Sequence[int] | None,
        most_endpoints: int,
    ) -> tuple[list[Claimed], bool]:
        """At most `room` messages of an endpoint; rooms has a number of their own for some. Of the endpoints whose turn
        it is, and of so many at most, or only of some. Also whether it ended before all had their turn."""

    def light_turn(
        self, after: int, count: int, lease: float, delivered: Sequence[Message]
    ) -> tuple[list[Claimed], list[int]]:
        """Claims of so many ids after this one, and settles what was delivered. Both only in the plain case, with
        nothing to decide (ulak_private.light_turn() says which); returns what it claimed and which it settled."""

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]: ...

    def settle(self, outcomes: Outcomes) -> None: ...

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None: ...

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        """The ids that are still held."""

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        """Of these endpoints, those that must not be sent to now, and why: open, half_open or disabled."""

    def check(self) -> Orders:
        """Whether to go on. Also the moment at which a cancel is noticed, so it is called ten times a second."""

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        """A sign of life with the counters since the last one."""

    def sweep(self) -> None:
        """Takes back what dead workers held and marks what expired, unless another worker is at it."""

    def is_poller(self) -> bool:
        """One worker of the fleet looks often for new messages; the others come when there is much to do."""

    def listen(self) -> WakeUp | None:
        """What senders wake the worker with, if the database can have it."""

    def request_wake_ups(self) -> WakeUps:
        """The next tuning.WAKE_UPS senders will notify."""

    def unlisten(self) -> None: ...
