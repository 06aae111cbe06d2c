"""Who waits for a slot, and who goes next."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ulak.worker.prefetch import Prefetched, Rates
from ulak.worker.tuning import PREFETCH_ENDPOINTS, PREFETCH_SECONDS, RATE_MEMORY_SECONDS


def fill(prefetched: Prefetched, make_endpoint: Any, make_message: Any, id: int, count: int, size: int = 1) -> None:
    to = make_endpoint()._replace(id=id)
    prefetched.add(to, [[make_message(100 * id + size * n + k) for k in range(size)] for n in range(count)])


class Room:
    """Free slots for all, and no more than so many for each."""

    def __init__(self, free: int, each: int) -> None:
        self.free = free
        self.each = each
        self.taken: Counter[int] = Counter()

    def of(self, endpoint_id: int) -> int:
        return min(self.free, self.each - self.taken[endpoint_id])

    def take(self, prefetched: Prefetched) -> list[int]:
        order = []
        for to, _ in prefetched.take(self.of, lambda: self.free > 0):
            self.free -= 1
            self.taken[to.id] += 1
            order.append(to.id)
        return order


def test_endpoints_take_turns(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    fill(prefetched, make_endpoint, make_message, 1, 3)
    fill(prefetched, make_endpoint, make_message, 2, 2)

    assert Room(10, 10).take(prefetched) == [1, 2, 1, 2, 1]
    assert len(prefetched) == 0


def test_who_was_served_last_is_last_the_next_time(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    for id in (1, 2, 3):
        fill(prefetched, make_endpoint, make_message, id, 5)

    assert [Room(1, 1).take(prefetched) for _ in range(4)] == [[1], [2], [3], [1]]


def test_an_endpoint_without_room_does_not_hold_up_the_others(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    fill(prefetched, make_endpoint, make_message, 1, 5)
    fill(prefetched, make_endpoint, make_message, 2, 5)
    room = Room(10, 5)
    room.taken[1] = 4

    assert Counter(room.take(prefetched)) == {1: 1, 2: 5}
    assert (prefetched.count(1), prefetched.count(2), len(prefetched)) == (4, 0, 4)


def test_messages_are_counted_and_not_requests(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    fill(prefetched, make_endpoint, make_message, 1, 4, size=3)

    Room(1, 1).take(prefetched)

    assert (len(prefetched), prefetched.count(1)) == (9, 9)


def test_what_is_removed_is_given_back(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    fill(prefetched, make_endpoint, make_message, 1, 2)
    fill(prefetched, make_endpoint, make_message, 2, 1)

    assert [message.id for message in prefetched.remove(1)] == [100, 101]
    assert (len(prefetched), set(prefetched.endpoint_ids())) == (1, {2})
    assert prefetched.remove(1) == []


def test_a_request_of_which_a_message_was_lost_leaves_the_line(make_endpoint: Any, make_message: Any) -> None:
    prefetched = Prefetched()
    fill(prefetched, make_endpoint, make_message, 1, 2, size=2)
    fill(prefetched, make_endpoint, make_message, 2, 1)

    lost = prefetched.remove_lost({100, 102, 103})

    assert sorted(message.id for message in lost) == [100, 101, 200]
    assert (len(prefetched), prefetched.count(1), prefetched.count(2)) == (2, 2, 0)


def test_a_fast_endpoint_may_have_many_in_line_and_a_slow_one_none() -> None:
    rates = Rates()
    now = 0.0
    for _ in range(50):
        now += 0.01
        rates.note({1: 100, 2: 0}, now)
    rates.note({3: 1}, now)

    ahead = rates.allowed(now)

    assert abs(ahead[1] - 10_000 * PREFETCH_SECONDS) <= 1
    assert not ahead.keys() & {2, 3}


def test_a_rate_is_forgotten_when_answers_stay_away() -> None:
    rates = Rates()
    rates.note({1: 1000}, 1.0)
    rates.note({1: 1000}, 1.1)

    assert rates.allowed(1.1 + RATE_MEMORY_SECONDS / 2)
    assert rates.allowed(1.1 + RATE_MEMORY_SECONDS * 1.1) == {}


def test_a_rate_follows_an_endpoint_that_slows_down() -> None:
    rates = Rates()
    now = 0.0
    for count in (100,) * 20 + (1,) * 20:
        now += 0.01
        rates.note({1: count}, now)

    assert rates.allowed(now)[1] <= 100 * PREFETCH_SECONDS + 10


def test_nothing_is_prefetched_where_many_endpoints_answer() -> None:
    rates = Rates()
    rates.note(dict.fromkeys(range(PREFETCH_ENDPOINTS), 100), 1.0)
    assert len(rates.allowed(1.0)) == PREFETCH_ENDPOINTS

    rates.note({PREFETCH_ENDPOINTS: 100}, 1.0)

    assert rates.allowed(1.0) == {}
