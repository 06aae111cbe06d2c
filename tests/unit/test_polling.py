"""How often a worker looks, by a clock that the test moves."""

from __future__ import annotations

import pytest
from ulak.worker.polling import Pace
from ulak.worker.tuning import BUSY_SECONDS, EXPECT_SECONDS

BUSY, IDLE = 0.002, 0.05


def looks(pace: Pace, start: float, end: float, last_sent: int) -> tuple[list[float], list[float]]:
    """The times of all looks, and of those that led to a claim, which found nothing."""
    now, looked, claimed = start, [], []
    while (now := now + pace.wait(now)) < end:
        looked.append(now)
        if pace.looked(now, last_sent):
            claimed.append(now)
            pace.claimed(now, None, False)
    return looked, claimed


def test_while_traffic_flows_looks_come_at_the_busy_pace() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    pace.claimed(0, newest=1, may_have_more=False)

    looked, _ = looks(pace, 0, 1, last_sent=1)

    assert 490 <= len(looked) <= 510


@pytest.mark.parametrize(("gap", "wait"), [(0.005, BUSY), (0.03, 1.5 * BUSY)])
def test_looks_come_less_often_when_most_are_in_vain(gap: float, wait: float) -> None:
    pace = Pace(BUSY, IDLE, now=0)
    for n in range(20):
        looks(pace, n * gap, (n + 1) * gap, last_sent=n)
        pace.claimed((n + 1) * gap, newest=n, may_have_more=False)

    assert pace.interval == wait


def test_without_traffic_looks_become_seldom() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    pace.claimed(0, newest=1, may_have_more=False)

    looks(pace, 0, BUSY_SECONDS + 2, last_sent=1)
    looked, claimed = looks(pace, BUSY_SECONDS + 2, BUSY_SECONDS + 12, last_sent=1)

    assert 195 <= len(looked) <= 205
    assert len(claimed) <= len(looked)


def test_a_long_idle_interval_is_kept() -> None:
    pace = Pace(BUSY, 5.0, now=0)

    looks(pace, 0, 100, last_sent=1)
    looked, _ = looks(pace, 100, 200, last_sent=1)

    assert len(looked) == 20


def test_a_new_id_is_claimed_at_once_and_looked_for_until_its_sender_may_have_committed() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    looks(pace, 0, 60, last_sent=1)

    _, claimed = looks(pace, 60, 60 + EXPECT_SECONDS, last_sent=2)

    # Each look claims, at the busy pace again.
    assert claimed[0] <= 60 + IDLE
    assert len(claimed) >= (60 + EXPECT_SECONDS - claimed[0]) / (1.5 * BUSY) * 0.9
    assert pace.patience(claimed[-1]) <= 1.5 * BUSY


def test_a_message_that_commits_late_is_found_at_a_third_of_the_idle_pace() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    looks(pace, 0, 60, last_sent=1)
    looks(pace, 60, 62, last_sent=2)

    _, claimed = looks(pace, 62, 63, last_sent=2)

    assert 6 <= len(claimed) <= 7


def test_an_id_that_was_claimed_is_not_looked_for_any_more() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    looks(pace, 0, 60, last_sent=1)
    assert pace.looked(60, last_sent=2)
    pace.claimed(60, newest=2, may_have_more=False)
    assert pace.patience(60) > 10 * BUSY

    looked, claimed = looks(pace, 60, 60.1, last_sent=2)

    assert len(looked) > 30
    assert len(claimed) <= 2


def test_only_the_poller_looks_at_the_busy_pace() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    pace.is_poller = False
    looks(pace, 0, 60, last_sent=1)

    looked, claimed = looks(pace, 60, 61, last_sent=2)

    assert 18 <= len(looked) <= 22
    assert claimed


def test_there_is_no_wait_while_there_are_more() -> None:
    pace = Pace(BUSY, IDLE, now=0)
    pace.looked(0, last_sent=1)

    pace.claimed(0, newest=5, may_have_more=True)

    assert pace.wait(0) == 0
