"""The books can fail: each kind of wrong entry is found, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.books import Allowance, Arrival, DeadLetter, End, Ledger, Order, audit

ORDERS = [Order("a", 1, "shop", "k", 1), Order("b", 2, "shop", "k", 2), Order("c", 3, "shop", None, None)]
ARRIVALS = [
    Arrival(1.0, "shop", "a", "A", 1, False),
    Arrival(2.0, "shop", "a", "A", 2, True),
    Arrival(3.0, "shop", "b", "B", 1, True),
]
ENDS = [End(1, "A", "completed", 2, 1), End(2, "B", "completed", 1, 0), End(3, "C", "expired", 0, 0)]
BALANCED = Ledger(ORDERS, frozenset("abc"), frozenset("r"), ARRIVALS, ENDS, [])


def problems(ledger: Ledger, **allowed: bool | int) -> list[str]:
    return [each.partition(":")[0] for each in audit(ledger, Allowance(**allowed)).problems]  # type: ignore[arg-type]


def with_end(end: End) -> Ledger:
    return replace(BALANCED, ends=[end if each.id == end.id else each for each in ENDS])


def with_arrival(*arrivals: Arrival) -> Ledger:
    return replace(BALANCED, arrivals=[*ARRIVALS, *arrivals])


def test_balanced_books_have_no_problem() -> None:
    report = audit(BALANCED)

    assert report.problems == []
    assert (report.sent, report.delivered, report.dead, report.expired, report.duplicates) == (3, 2, 0, 1, 0)


def test_a_dead_message_balances_with_its_dead_letter() -> None:
    ledger = with_end(End(3, "C", "failed", 1, 0))

    assert problems(ledger) == ["dead letters don't match"]
    assert problems(replace(ledger, dead_letters=[DeadLetter(3, "C")])) == []


def test_a_commit_that_was_never_answered_may_have_been_delivered() -> None:
    ledger = with_arrival(Arrival(4.0, "shop", "z", "Z", 1, True))

    assert problems(replace(ledger, unanswered=frozenset("z"))) == []
    assert problems(replace(ledger, unanswered=frozenset("y"))) == ["delivered from nowhere"]


def test_a_receiver_that_drops_copies_may_have_got_an_earlier_attempt() -> None:
    later, never = with_end(End(1, "A", "completed", 3, 1)), with_end(End(3, "C", "completed", 1, 0))
    allowance = Allowance(first_copy_only=True)

    assert audit(later, allowance).problems == []
    assert len(audit(never, allowance).problems) == 1


@pytest.mark.parametrize(
    ("ledger", "found"),
    [
        (replace(BALANCED, ends=ENDS[:2]), "lost"),
        (replace(BALANCED, ends=[*ENDS, ENDS[0]]), "in two places"),
        (replace(BALANCED, ends=[*ENDS, End(4, "D", "expired", 0, 0)]), "from nowhere"),
        (replace(BALANCED, orders=ORDERS[:2], ends=ENDS[:2]), "confirmed but not committed"),
        (replace(BALANCED, rolled_back=frozenset("c")), "rolled back but committed"),
        (replace(BALANCED, dead_letters=[DeadLetter(7, "G")]), "a dead letter that isn't the message's"),
        (with_end(End(3, "C", "pending", 0, 0)), "still under way"),
        (with_end(End(3, "C", "completed", 1, 0)), "settled by an attempt that was never accepted"),
        (with_end(End(1, "A", "completed", 3, 1)), "settled by an attempt that was never accepted"),
        (with_end(End(1, "A", "completed", 2, 2)), "more retries than attempts"),
        (with_end(End(1, "A", "expired", 2, 1)), "delivered and given up"),
        (with_end(End(2, "X", "completed", 1, 0)), "another webhook-id"),
        (with_arrival(Arrival(4.0, "shop", "r", "R", 1, True)), "delivered though rolled back"),
        (with_arrival(Arrival(4.0, "shop", "z", "Z", 1, True)), "delivered from nowhere"),
        (with_arrival(Arrival(2.5, "shop", "a", "A", 2, False)), "one attempt sent twice"),
        (with_arrival(Arrival(4.0, "shop", "b", "B", 2, False)), "more attempts arrived than were made"),
        (with_arrival(Arrival(0.5, "shop", "b", "B", 0, False)), "overtaken"),
    ],
)
def test_a_wrong_entry_is_found(ledger: Ledger, found: str) -> None:
    assert problems(ledger) == [found]


def test_a_message_accepted_before_its_elder_is_out_of_order() -> None:
    earlier = [Arrival(1.5, "shop", "b", "B", 1, True) if each.token == "b" else each for each in ARRIVALS]

    assert problems(replace(BALANCED, arrivals=earlier)) == ["accepted out of order"]


@pytest.mark.parametrize(
    ("allowed", "found"), [(False, ["duplicates"]), (2, ["duplicates"]), (1, []), (True, [])], ids=str
)
def test_duplicates_are_found_unless_a_fault_explains_them(allowed: bool | int, found: list[str]) -> None:
    ledger = replace(
        with_end(End(2, "B", "completed", 2, 1)), arrivals=[*ARRIVALS, Arrival(4.0, "shop", "b", "B", 2, True)]
    )

    assert problems(ledger, duplicates=allowed) == found


def test_a_duplicate_is_no_excuse_for_a_second_webhook_id() -> None:
    ledger = with_arrival(Arrival(4.0, "shop", "c", "X", 1, True))

    assert "another webhook-id" in problems(ledger, duplicates=True, repeated_attempts=True)


def test_a_crash_excuses_an_attempt_that_comes_twice() -> None:
    ledger = with_arrival(Arrival(4.0, "shop", "a", "A", 2, True))

    assert problems(ledger, duplicates=True, repeated_attempts=True) == []
    assert problems(ledger, duplicates=True) == ["one attempt sent twice"]
