"""The books of a run: what was sent, what the receiver saw and what the queue says, and whether all three agree."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

LIVE = ("pending", "processing")
# This many problems of a kind are spelled out.
SPELLED_OUT = 5


class Order(NamedTuple):
    """A committed transaction of a producer. `place` counts the orders of its key in the order of their commits."""

    token: str
    id: int
    endpoint: str
    key: str | None
    place: int | None


class Arrival(NamedTuple):
    """A request that reached the receiver; accepted if it was answered with 2xx. They came in the order of `at`."""

    at: float
    endpoint: str
    token: str
    webhook_id: str
    attempt: int
    accepted: bool


class End(NamedTuple):
    """A message in ulak.queue or ulak.archive."""

    id: int
    webhook_id: str
    status: str
    attempts: int
    retry_count: int


class DeadLetter(NamedTuple):
    id: int
    webhook_id: str


@dataclass(frozen=True)
class Ledger:
    orders: Sequence[Order]
    # Tokens whose commit was confirmed to the producer, and tokens whose transaction it rolled back.
    confirmed: frozenset[str]
    rolled_back: frozenset[str]
    arrivals: Sequence[Arrival]
    ends: Sequence[End]
    dead_letters: Sequence[DeadLetter]
    # Tokens whose commit was asked for and never answered: a server that died may have committed and delivered what no standby got.
    unanswered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Allowance:
    """What the faults of a scenario excuse."""

    # Deliveries beyond the first: any number, exactly this many, or none.
    duplicates: bool | int = False
    # A crash forgets commits of the worker, and with them an attempt that was made: its number comes again. A receiver that
    # dies gets a request again whose connection broke.
    repeated_attempts: bool = False
    # The receiver keeps the first copy of a message and acknowledges the others: an attempt whose acknowledgement was lost is the
    # one that arrived, and a later one has settled the message.
    first_copy_only: bool = False


NO_EXCUSE = Allowance()


@dataclass
class Report:
    sent: int = 0
    delivered: int = 0
    dead: int = 0
    expired: int = 0
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "clean" if not self.problems else f"{len(self.problems)} problems"

    def __str__(self) -> str:
        facts = {name: value for name, value in asdict(self).items() if name != "problems"}
        kinds = Counter(problem.partition(": ")[0] for problem in self.problems)
        shown: Counter[str] = Counter()
        lines = []
        for problem in self.problems:
            kind = problem.partition(": ")[0]
            shown[kind] += 1
            if shown[kind] <= SPELLED_OUT:
                lines.append(problem)
            elif shown[kind] == SPELLED_OUT + 1:
                lines.append(f"{kind}: and {kinds[kind] - SPELLED_OUT} more")
        return "\n".join([f"{facts}", *lines])


def audit(ledger: Ledger, allowance: Allowance = NO_EXCUSE) -> Report:
    report = Report(sent=len(ledger.orders))
    auditor = _Auditor(ledger, allowance, report)
    auditor.check_commits()
    auditor.check_ends()
    auditor.check_arrivals()
    auditor.check_order()
    return report


class _Auditor:
    def __init__(self, ledger: Ledger, allowance: Allowance, report: Report) -> None:
        self.ledger = ledger
        self.allowance = allowance
        self.report = report
        self.by_token = {order.token: order for order in ledger.orders}
        self.by_id = {order.id: order for order in ledger.orders}
        self.arrivals: dict[str, list[Arrival]] = defaultdict(list)
        for arrival in sorted(ledger.arrivals):
            self.arrivals[arrival.token].append(arrival)
        self.ends = {end.id: end for end in ledger.ends}

    def problem(self, kind: str, what: object) -> None:
        self.report.problems.append(f"{kind}: {what}")

    def accepted(self, token: str) -> list[Arrival]:
        return [arrival for arrival in self.arrivals.get(token, []) if arrival.accepted]

    def check_commits(self) -> None:
        for token in sorted(self.ledger.confirmed - self.by_token.keys()):
            self.problem("confirmed but not committed", token)
        for token in sorted(self.ledger.rolled_back & self.by_token.keys()):
            self.problem("rolled back but committed", token)

    def check_ends(self) -> None:
        for id, count in Counter(end.id for end in self.ledger.ends).items():
            if count > 1:
                self.problem("in two places", f"message {id}")
        for id in sorted(self.by_id.keys() - self.ends.keys()):
            self.problem("lost", f"message {id}, {self.by_id[id].token}")
        for id in sorted(self.ends.keys() - self.by_id.keys()):
            self.problem("from nowhere", f"message {id}")
        letters = Counter(self.ledger.dead_letters)
        for end in self.ends.values():
            if end.id in self.by_id:
                self.check_end(end, self.by_id[end.id], letters.pop(DeadLetter(end.id, end.webhook_id), 0))
        for letter in letters:
            self.problem("a dead letter that isn't the message's", letter)

    def check_end(self, end: End, order: Order, letters: int) -> None:
        accepted = self.accepted(order.token)
        if end.status in LIVE:
            self.problem("still under way", end)
        elif end.status == "completed":
            self.report.delivered += 1
            # Settling is fenced: the attempt that settled it is one that the receiver accepted.
            attempts = {arrival.attempt for arrival in accepted}
            is_accepted = end.attempts in attempts
            if self.allowance.first_copy_only:
                is_accepted = any(attempt <= end.attempts for attempt in attempts)
            if not is_accepted:
                self.problem("settled by an attempt that was never accepted", f"{end}, accepted: {accepted}")
        elif end.status == "failed":
            self.report.dead += 1
        elif end.status == "expired":
            self.report.expired += 1
        if letters != (end.status == "failed"):
            self.problem("dead letters don't match", f"{end} has {letters}")
        if end.status in ("failed", "expired") and accepted and not self.allowance.duplicates:
            self.problem("delivered and given up", end)
        if end.attempts < end.retry_count + (end.status in ("completed", "failed")):
            self.problem("more retries than attempts", end)

    def check_arrivals(self) -> None:
        for token, arrivals in self.arrivals.items():
            if token not in self.by_token and token not in self.ledger.unanswered:
                kind = "delivered though rolled back" if token in self.ledger.rolled_back else "delivered from nowhere"
                self.problem(kind, token)
            elif token in self.by_token and (end := self.ends.get(self.by_token[token].id)) is not None:
                self.check_message(arrivals, end)
        allowed = self.allowance.duplicates
        if allowed is not True and self.report.duplicates != int(allowed):
            twice = [token for token in self.arrivals if len(self.accepted(token)) > 1]
            self.problem("duplicates", f"{self.report.duplicates} instead of {int(allowed)}: {twice[:SPELLED_OUT]}")

    def check_message(self, arrivals: list[Arrival], end: End) -> None:
        self.report.duplicates += max(0, len([each for each in arrivals if each.accepted]) - 1)
        for webhook_id in {arrival.webhook_id for arrival in arrivals} - {end.webhook_id}:
            self.problem("another webhook-id", f"{webhook_id} came for {end}")
        if self.allowance.repeated_attempts:
            return
        attempts = [arrival.attempt for arrival in arrivals]
        if len(set(attempts)) < len(attempts):
            self.problem("one attempt sent twice", f"{end}: {attempts}")
        if max(attempts) > end.attempts:
            self.problem("more attempts arrived than were made", f"{end}: {attempts}")

    def check_order(self) -> None:
        """By first request and by first acceptance: neither may overtake."""
        self.check_overtaking("overtaken", self.ledger.arrivals)
        self.check_overtaking("accepted out of order", [each for each in self.ledger.arrivals if each.accepted])

    def check_overtaking(self, kind: str, arrivals: Iterable[Arrival]) -> None:
        latest: dict[tuple[str, str], Order] = {}
        seen = set()
        for arrival in sorted(arrivals):
            order = self.by_token.get(arrival.token)
            if order is None or order.key is None or order.place is None or arrival.token in seen:
                continue
            seen.add(arrival.token)
            before = latest.get((order.endpoint, order.key))
            if before is not None and before.place is not None and before.place > order.place:
                self.problem(kind, f"{order} came after {before}")
            else:
                latest[order.endpoint, order.key] = order


# Where the entries come from.


def read_arrivals(file: Path) -> list[Arrival]:
    """What support.recorder wrote: a line when a request came and a line when it was answered."""
    first: dict[str, dict[str, Any]] = {}
    accepted = set()
    # The last line may be half written.
    whole, _, _ = file.read_text().rpartition("\n")
    for line in whole.splitlines():
        entry = json.loads(line)
        first.setdefault(entry["exchange"], entry)
        if 200 <= entry["status"] < 300:
            accepted.add(entry["exchange"])
    return [
        Arrival(place, entry["endpoint"], entry["token"], entry["webhook_id"], entry["attempt"], exchange in accepted)
        for place, (exchange, entry) in enumerate(first.items())
    ]


def read_orders(db: psycopg.Connection[Any]) -> list[Order]:
    return [Order(*row) for row in db.execute("select token, id, endpoint, ordering_key, place from shop.orders")]


def read_ends(db: psycopg.Connection[Any]) -> list[End]:
    query = """
        select id, message_id::text, status, attempts, retry_count from ulak.queue
        union all
        select id, message_id::text, status, attempts, retry_count from ulak.archive
    """
    return [End(*row) for row in db.execute(query)]


def read_dead_letters(db: psycopg.Connection[Any]) -> list[DeadLetter]:
    return [DeadLetter(*row) for row in db.execute("select original_message_id, message_id::text from ulak.dlq")]
