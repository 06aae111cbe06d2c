"""Shares of a worker's slots: nobody gets all, and who is slow is in nobody's way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from ulak.worker.request_slots import RequestSlots
from ulak.worker.tuning import LEAST_WINDOW, SLOW_REMEMBERED, SLOW_SECONDS

QUICK, SLOW = 0.01, SLOW_SECONDS + 1


def take(slots: RequestSlots, endpoint_id: int, count: int) -> None:
    for _ in range(count):
        slots.take(endpoint_id)


def give_back(slots: RequestSlots, endpoint_id: int, count: int) -> None:
    for _ in range(count):
        slots.give_back(endpoint_id, QUICK)


def test_an_endpoint_gets_at_most_seven_eighths() -> None:
    slots = RequestSlots(128)
    assert slots.room() == 112

    take(slots, 1, 112)

    assert slots.free == 16
    assert slots.rooms() == {1: 0}
    assert slots.room() == 14


def test_the_only_slot_can_be_used() -> None:
    slots = RequestSlots(1)
    assert slots.room() == 1

    take(slots, 1, 1)

    assert (slots.free, slots.rooms()) == (0, {1: 0})


def test_what_a_stuck_endpoint_holds_leaves_the_others_all_slots() -> None:
    slots = RequestSlots(128)
    take(slots, 1, 112)

    slots.see_stuck([1])

    assert (slots.free, slots.room()) == (128, 112)
    assert slots.rooms() == {1: 0}
    assert slots.slow_in_flight == 112


def test_slow_endpoints_share_a_lane() -> None:
    slots = RequestSlots(128)
    take(slots, 1, 100)
    take(slots, 2, 10)

    slots.see_stuck([1, 2])

    assert slots.rooms() == {1: 3, 2: 14}


def test_an_endpoint_is_slow_until_it_answers_quickly_and_nothing_of_it_is_stuck() -> None:
    slots = RequestSlots(128)
    take(slots, 1, 3)
    slots.see_stuck([1])

    slots.give_back(1, QUICK)
    assert slots.slow == {1}
    slots.see_stuck([])
    assert slots.slow == {1}
    slots.give_back(1, QUICK)

    assert slots.slow == set()
    assert (slots.free, slots.slow_in_flight) == (127, 0)


def test_a_slow_answer_makes_an_endpoint_slow_even_if_nobody_looked_meanwhile() -> None:
    slots = RequestSlots(128)
    take(slots, 1, 2)

    slots.give_back(1, SLOW)

    assert slots.slow == {1}
    assert slots.slow_in_flight == 1


def test_only_so_many_slow_endpoints_are_remembered_and_those_with_requests_under_way_always() -> None:
    slots = RequestSlots(128)
    take(slots, 1, 2)
    slots.give_back(1, SLOW)

    for endpoint_id in range(2, 10_000):
        take(slots, endpoint_id, 1)
        slots.give_back(endpoint_id, SLOW)
    take(slots, 9_999, 1)

    # The last ones, and the first one, which has a request under way.
    assert slots.slow == {1, *range(10_000 - SLOW_REMEMBERED, 10_000)}
    assert len(slots.rooms()) == SLOW_REMEMBERED + 1
    assert slots.slow_in_flight == 2
    slots.give_back(1, QUICK)
    assert 1 not in slots.slow


def test_both_lanes_together_are_the_limit() -> None:
    slots = RequestSlots(16)
    for endpoint_id in range(100):
        take(slots, endpoint_id, min(1, slots.free))
        slots.see_stuck(range(100))

    assert slots.slow_in_flight == 32
    assert slots.free == 0


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.sampled_from(["take", "quick", "slow", "stuck", "unstuck"]), st.integers(1, 4)), max_size=200
    ),
)
def test_no_lane_leaks_a_slot(total: int, steps: list[tuple[str, int]]) -> None:
    slots = RequestSlots(total)
    held = dict.fromkeys(range(1, 5), 0)
    for action, endpoint_id in steps:
        if action == "take" and slots.rooms().get(endpoint_id, slots.room()) > 0:
            slots.take(endpoint_id)
            held[endpoint_id] += 1
        elif action in ("quick", "slow") and held[endpoint_id]:
            slots.give_back(endpoint_id, QUICK if action == "quick" else SLOW)
            held[endpoint_id] -= 1
        elif action == "stuck" and held[endpoint_id]:
            slots.see_stuck(slots.stuck | {endpoint_id})
        elif action == "unstuck":
            slots.see_stuck(slots.stuck - {endpoint_id})
        assert slots.slow_in_flight == sum(held[each] for each in slots.slow)
        assert 0 <= sum(held.values()) <= 2 * total
    for endpoint_id, count in held.items():
        for _ in range(count):
            slots.give_back(endpoint_id, QUICK)

    assert slots.free == total
    assert slots.slow_in_flight == 0


def test_what_an_endpoint_has_claimed_may_take_every_slot_but_the_last_eighth() -> None:
    slots = RequestSlots(16)
    for _ in range(10):
        slots.take(1)
    for _ in range(2):
        slots.take(2)

    # Of four free ones it could claim for two; what it has claimed already may begin.
    assert slots.room_of(1) == 2
    assert slots.may_start(1) == 4
    for _ in range(2):
        slots.give_back(2, 0.001)
    assert slots.may_start(1) == 4
    for _ in range(4):
        slots.take(1)
    assert slots.may_start(1) == 0
    assert slots.may_start(2) == 2


def test_what_waited_in_line_leaves_the_last_eighth_to_others_unless_it_has_nothing_in_flight() -> None:
    slots = RequestSlots(16)
    for _ in range(13):
        slots.take(1)

    assert slots.may_start(1) == 1
    assert slots.may_start_prefetched(1) == 1
    slots.take(3)
    assert slots.may_start_prefetched(1) == 0
    assert slots.may_start_prefetched(2) == 1
    for _ in range(2):
        slots.take(4)
    assert slots.may_start_prefetched(2) == 0


def test_receivers_that_answer_at_once_have_a_wave_in_flight_and_no_more() -> None:
    slots = RequestSlots(128)
    assert slots.may_start(1) == LEAST_WINDOW
    take(slots, 1, LEAST_WINDOW)
    assert (slots.may_start(1), slots.may_start(2), slots.may_start_prefetched(2)) == (0, 0, 0)

    give_back(slots, 1, LEAST_WINDOW // 2)
    slots.adapt_window(LEAST_WINDOW)

    assert slots.window == LEAST_WINDOW
    assert slots.may_start(2) == LEAST_WINDOW // 2
    # What may be claimed doesn't depend on it.
    assert slots.free == 128 - LEAST_WINDOW // 2


def test_the_wave_grows_while_few_answers_come_and_shrinks_again() -> None:
    slots = RequestSlots(128)
    take(slots, 1, LEAST_WINDOW)

    sizes = []
    for _ in range(3):
        slots.adapt_window(slots.quick_in_flight)
        sizes.append(slots.window)
        take(slots, 1, slots.may_start(1))

    assert sizes == [64, 128, 128]
    assert slots.quick_in_flight == 112
    for _ in range(20):
        give_back(slots, 1, slots.quick_in_flight)
        slots.adapt_window(112)
        take(slots, 1, 112)
    assert slots.window == LEAST_WINDOW


def test_slow_receivers_are_not_part_of_the_wave() -> None:
    slots = RequestSlots(128)
    take(slots, 1, LEAST_WINDOW)
    assert slots.may_start(2) == 0

    slots.see_stuck([1])

    assert slots.quick_in_flight == 0
    assert slots.may_start(2) == LEAST_WINDOW
    assert slots.may_start(1) == 112 - LEAST_WINDOW


def test_a_worker_with_few_slots_uses_them_all() -> None:
    slots = RequestSlots(8)
    assert slots.may_start(1) == 7
    slots.adapt_window(0)
    assert slots.window == 8
