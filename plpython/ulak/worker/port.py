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
    errors: Sequence[str | None] | None = None
    retry_after: Sequence[int | None] | None = None
    responses: Sequence[str | None] | None = None
    # Which came in one request, for the circuit breaker; None: each came in its own.
    requests: Sequence[int] | None = None


class Wish(NamedTuple):
    """What may be claimed: at most how many messages, of some endpoints and of each other one."""

    most: int
    rooms: Mapping[int, int]
    room: int
    # Only messages behind this id, which are new; None: whatever is due.
    behind: int | None = None
    # Whatever is due, if nothing is new.
    is_for_all: bool = True
    # Only of these endpoints; None: of all in turn, with at most this many visits.
    endpoint_ids: Sequence[int] | None = None
    most_visits: int = 1000


class Turn(NamedTuple):
    """What came of a turn."""

    claimed: Sequence[Claimed]
    # Something that is due may have been left behind.
    left_out_others: bool
    # The id that a sender drew last, as of before the claim.
    last_sent: int
    # Senders up to this id notify, if that was asked for.
    notified_to: int | None = None
    # Whatever is due was asked for, and no message waits, not even for its time.
    is_empty: bool = False


class Database(Protocol):
    """No transaction is open when a method returns. A turn is one, unless a claimed text has to be read by itself. Each
    may raise Busy or Refused."""

    def turn(self, outcomes: Outcomes | None, wish: Wish | None, lease: float, wake_ups: bool) -> Turn:
        """Settles, then claims. wake_ups: the next senders are to notify."""

    def settle(self, outcomes: Outcomes) -> None: ...

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        """Looks every interval until the id that a sender drew last isn't this one, for at most this many seconds;
        returns it."""

    def check_interrupts(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]: ...

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None: ...

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        """The ids that are still held."""

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        """Of these endpoints, those that must not be sent to now, and why: open, half_open or disabled."""

    def check(self) -> Orders:
        """Whether to go on."""

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        """A sign of life with the counters since the last one."""

    def sweep(self) -> None:
        """Takes back what dead workers held and marks what expired, unless another worker is at it."""

    def is_poller(self) -> bool:
        """One worker of the fleet is notified of new messages, or looks often; the others come when there is much."""

    def listen(self) -> WakeUp | None:
        """What senders wake the worker with, if the database can have it."""

    def unlisten(self) -> None: ...
