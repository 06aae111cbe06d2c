"""What a worker holds: request slots, lanes and shares, by any sequence of what can happen."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from ulak.messages.delivery import Endpoint, Message
from ulak.worker.held import Held
from ulak.worker.tuning import LOOK_AHEAD, PAYLOAD_BYTES, SLOW_REMEMBERED, SLOW_SECONDS

SLOTS = 16


class Desk:
    """Claims, starts and ends requests of one message each."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.held = Held(slots)
        self.now = 100.0
        self.under_way: list[tuple[float, int, Sequence[Message]]] = []
        self.ended = 0
        self._id = 0

    def claim(self, endpoint_id: int, count: int) -> list[Message]:
        messages = [Message(self._id + n, "m", 1, "{}") for n in range(1, count + 1)]
        self._id += count
        self.held.claim(messages)
        to = Endpoint(endpoint_id, f"e{endpoint_id}", 1, "http", 1, None, 30.0, None)
        self.held.wait(to, [[each] for each in messages])
        return messages

    def start(self) -> list[int]:
        started = [(self.now, to.id, messages) for to, messages in self.held.start()]
        self.under_way += started
        return [endpoint_id for _, endpoint_id, _ in started]

    def end(self, place: int = 0) -> None:
        began, endpoint_id, messages = self.under_way.pop(place)
        self.held.end(endpoint_id, self.now - began)
        self.held.forget(messages)
        self.ended += 1

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.held.note_stuck({id for began, id, _ in self.under_way if began < self.now - SLOW_SECONDS})


def test_an_endpoint_has_at_most_seven_eighths_of_the_slots() -> None:
    desk = Desk()
    desk.claim(1, 30)

    assert len(desk.start()) == 14
    desk.claim(2, 30)
    assert desk.start() == [2, 2]


def test_the_only_slot_can_be_used() -> None:
    desk = Desk(1)
    desk.claim(1, 2)

    assert desk.start() == [1]


def test_endpoints_take_turns() -> None:
    desk = Desk(4)
    for endpoint_id in (1, 2, 3):
        desk.claim(endpoint_id, 3)

    assert desk.start() == [1, 2, 3, 1]
    desk.end()
    assert desk.start() == [2]


def test_a_receiver_that_answers_has_more_ahead_than_one_that_has_not_yet() -> None:
    desk = Desk()
    before = desk.held.room_of(1)
    desk.claim(1, 5)
    desk.start()
    desk.end()

    assert (before, desk.held.room_of(1)) == (14, LOOK_AHEAD * SLOTS * 7 // 8 - 4)


def test_more_is_claimed_when_half_of_what_waits_is_gone_or_slots_are_free_for_an_endpoint_that_has_more() -> None:
    desk = Desk()
    for endpoint_id in range(1, 13):
        desk.claim(endpoint_id, 8)
    desk.start()
    while not (desk.held.is_low() or desk.held.is_one_low([1, 20])):
        desk.end()
        desk.start()
    waiting = 12 * 8 - SLOTS - desk.ended

    assert waiting == (LOOK_AHEAD - 1) * SLOTS // 2

    alone = Desk()
    alone.claim(1, 14)
    alone.start()
    alone.claim(1, 74)
    assert alone.held.is_one_low([2])
    assert not alone.held.is_one_low([1])


def test_a_slow_receiver_leaves_the_others_all_slots_and_has_nothing_ahead() -> None:
    desk = Desk()
    desk.claim(1, 14)
    desk.start()
    desk.pass_time(2 * SLOW_SECONDS)
    desk.claim(2, 30)

    assert desk.start() == [2] * 14
    assert desk.held.room_of(1) == 0
    desk.end()
    assert desk.held.room_of(1) == 1


def test_an_endpoint_is_slow_until_it_answers_quickly_and_nothing_of_it_is_stuck() -> None:
    desk = Desk()
    desk.claim(1, 1)
    desk.start()
    desk.pass_time(2 * SLOW_SECONDS)
    desk.claim(1, 2)
    desk.start()
    desk.end(1)
    while_stuck = list(desk.held.slow_endpoints)
    desk.end()
    desk.pass_time(0.001)
    desk.end()

    assert (while_stuck, list(desk.held.slow_endpoints)) == ([1], [])


def test_only_a_limited_number_of_slow_endpoints_is_remembered() -> None:
    desk = Desk()
    for endpoint_id in range(1, SLOW_REMEMBERED + 10):
        desk.claim(endpoint_id, 1)
        desk.start()
        desk.now += SLOW_SECONDS
        desk.end()

    assert len(list(desk.held.slow_endpoints)) == SLOW_REMEMBERED


def test_no_slow_endpoint_that_has_requests_is_forgotten() -> None:
    desk = Desk(SLOW_REMEMBERED * 2)
    with_requests = range(1, SLOW_REMEMBERED)
    for endpoint_id in with_requests:
        desk.claim(endpoint_id, 1)
    desk.start()
    desk.pass_time(SLOW_SECONDS * 2)
    for endpoint_id in range(1000, 1000 + SLOW_REMEMBERED):
        desk.claim(endpoint_id, 1)
        desk.start()
        desk.pass_time(SLOW_SECONDS)
        desk.end(-1)

    assert desk.held.slow_endpoints.keys() >= set(with_requests)
    # So the next messages of an endpoint don't take slots of the quick lane.
    assert len(desk.held.slow_endpoints) == len(with_requests) + SLOW_REMEMBERED


def test_what_waits_is_removed_and_what_is_under_way_stays() -> None:
    desk = Desk(4)
    messages = desk.claim(1, 6)
    desk.start()

    assert desk.held.remove(1) == messages[3:]
    assert desk.held.endpoints_that_wait() == []
    assert len(desk.held.leases) == 3


def test_a_request_whose_message_was_lost_is_not_sent() -> None:
    desk = Desk(4)
    messages = desk.claim(1, 6)
    desk.start()
    desk.held.remove(1, kept={each.id for each in messages[:4]})

    desk.end()
    assert desk.start() == [1]
    desk.end()
    assert desk.start() == []


def test_large_messages_leave_less_room_and_one_may_be_larger_than_all_memory() -> None:
    held = Held(4)
    empty = held.room_for_messages()
    message = Message(1, "m", 1, "x" * PAYLOAD_BYTES)
    held.claim([message])
    full = held.room_for_messages()
    held.forget([message])

    assert (empty, full, held.room_for_messages()) == (64, 0, 1)


STEPS = st.lists(st.tuples(st.sampled_from(["claim", "end", "wait", "remove"]), st.integers(1, 5)), max_size=60)


def test_endpoints_with_few_requests_count_as_unknown_ones() -> None:
    desk = Desk(64)
    for endpoint_id in range(1, 21):
        desk.claim(endpoint_id, 3)
    desk.claim(21, 10)

    assert desk.held.rooms() == {21: 46}
    desk.start()
    desk.pass_time(SLOW_SECONDS + 1)
    assert desk.held.rooms().keys() == {*range(1, 22)}


@given(slots=st.integers(1, 20), steps=STEPS)
def test_no_lane_leaks_a_slot(slots: int, steps: list[tuple[str, int]]) -> None:
    desk = Desk(slots)
    for step, number in steps:
        if step == "claim":
            desk.claim(number, number)
        elif step == "end" and desk.under_way:
            desk.end(number % len(desk.under_way))
        elif step == "wait":
            desk.pass_time(number / 4)
        elif step == "remove" and number in desk.held.endpoints_that_wait():
            desk.held.remove(number)
        desk.start()
        assert len(desk.under_way) <= 2 * slots

    while desk.under_way:
        desk.pass_time(0.001)
        desk.end()
        desk.start()
    share = max(1, slots * 7 // 8)
    assert len(desk.held.leases) == 0
    assert {desk.held.room_of(each) for each in [*list(desk.held.slow_endpoints), None]} == {share}
