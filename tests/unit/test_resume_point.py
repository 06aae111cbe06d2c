"""When a claim begins where the last one ended."""

from __future__ import annotations

from ulak.worker.resume_point import Place, ResumePoint
from ulak.worker.tuning import RESUME_LONGEST

PLACE = Place(1, 0, "2026-11-16 12:00:00+00", 7)


def test_a_claim_that_took_its_usual_time_leaves_no_resume_point() -> None:
    resume_point = ResumePoint()

    resume_point.claimed(now=100.001, began=100.0, count=10, is_full=True, place=PLACE)

    assert resume_point.place(1, 100.001) is None


def test_after_a_claim_that_lost_time_the_next_ones_begin_at_its_end_for_a_while() -> None:
    resume_point = ResumePoint()
    resume_point.claimed(now=100.011, began=100.0, count=0, is_full=True, place=PLACE)
    later = PLACE._replace(id=8)

    assert resume_point.place(1, 100.011) == PLACE
    resume_point.claimed(now=100.05, began=100.04, count=1, is_full=False, place=later)
    assert resume_point.place(1, 100.1) == later
    assert resume_point.place(1, 100.3) is None


def test_no_endpoint_waits_longer_than_a_second_for_a_full_claim() -> None:
    resume_point = ResumePoint()

    resume_point.claimed(now=110.0, began=100.0, count=0, is_full=True, place=PLACE)

    assert resume_point.place(1, 110.0 + RESUME_LONGEST * 0.99) == PLACE
    assert resume_point.place(1, 110.0 + RESUME_LONGEST * 1.01) is None


def test_a_claim_of_several_endpoints_leaves_no_resume_point() -> None:
    resume_point = ResumePoint()

    resume_point.claimed(now=100.011, began=100.0, count=2, is_full=True, place=None)

    assert resume_point.place(1, 100.011) is None


def test_what_a_message_costs_is_learned_from_claims_that_begin_at_the_resume_point() -> None:
    """A claim of a hundred takes 4 ms when it walks over nothing, and 9 ms when it walks over much."""
    resume_point = ResumePoint()
    now = 100.0
    begun = []
    for _ in range(200):
        place = resume_point.place(1, now)
        begun.append(place is None)
        began = now
        now += 0.009 if place is None else 0.004
        resume_point.claimed(now, began, 100, place is None, PLACE)
        now += 0.01

    # At first one in nine; then a few whole ones now and then.
    assert sum(begun[:9]) == 8
    assert sum(begun[-100:]) < 25


def test_on_a_machine_that_is_slow_claims_begin_at_the_beginning_all_the_same() -> None:
    resume_point = ResumePoint()
    now = 100.0
    wholes = 0
    for _ in range(200):
        place = resume_point.place(1, now)
        wholes += place is None
        began = now
        now += 0.02
        resume_point.claimed(now, began, 100, place is None, PLACE)
        now += 0.01

    assert wholes > 150


def test_another_endpoint_has_no_resume_point() -> None:
    resume_point = ResumePoint()

    resume_point.claimed(now=100.011, began=100.0, count=0, is_full=True, place=PLACE)

    assert resume_point.place(1, 100.011) == PLACE
    assert resume_point.place(2, 100.011) is None
