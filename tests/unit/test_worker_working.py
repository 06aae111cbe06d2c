"""The worker while it has something to do: claims, request slots, prefetching."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from support.stage import FakeWakeUp, Stage
from ulak.messages.delivery import DELIVERED, Endpoint, Message, Outcome
from ulak.worker.port import Claimed, Outcomes, Wish
from ulak.worker.tuning import ENDPOINTS, LOOK_AHEAD, PAYLOAD_BYTES, STATISTICS_AT_ONCE, UNKNOWN_BYTES


def test_every_message_is_sent_and_settled_once(stage: Stage) -> None:
    ids = stage.database.put(count=1000)

    assert stage.run() == "over"

    assert sorted(stage.dispatcher.ids()) == ids
    assert stage.database.settled == dict.fromkeys(ids, Outcome())
    assert stage.database.released == {}


def test_outcomes_are_stored_in_groups_and_slots_are_filled_from_what_waits(stage: Stage) -> None:
    stage.database.wake_up = FakeWakeUp(stage.clock)
    stage.database.put(1, count=500)
    stage.database.put(2, count=500)

    stage.run()

    # Sixteen slots, and a multiple of that in hand, if there is enough memory for messages of an unknown size.
    assert len(stage.database.settled) == 1000
    assert len(stage.database.times("settle")) < 40
    assert len(stage.database.times("turn")) < 40 + 25
    assert stage.database.wishes[0].most == min(16 * LOOK_AHEAD, PAYLOAD_BYTES // UNKNOWN_BYTES)


def test_claims_take_messages_of_more_endpoints_if_each_has_too_few(stage: Stage) -> None:
    for endpoint_id in range(1, 601):
        stage.database.put(endpoint_id)

    stage.run(seconds=3)

    assert len(stage.database.settled) == 600
    assert stage.database.wishes[-1].most_endpoints >= 2 * ENDPOINTS


def test_claims_take_messages_of_few_endpoints_if_each_has_many(stage: Stage) -> None:
    for endpoint_id in range(1, 601):
        stage.database.put(endpoint_id)
    for endpoint_id in range(1, 51):
        stage.database.put(endpoint_id, count=100)

    stage.run(seconds=3)

    assert len(stage.database.settled) == 5600
    assert {wish.most_endpoints for wish in stage.database.wishes[50:60]} == {ENDPOINTS}


def test_turns_keep_their_distance(stage: Stage) -> None:
    def flow(progress: object) -> None:
        stage.database.put(count=10)

    stage.database.hooks["report"] = flow
    stage.dispatcher.answer = lambda to, messages: (0.001 * (1 + messages[0].id % 7), DELIVERED)
    stage.run(seconds=3, turn_interval=20)

    turns = stage.database.times("turn")
    assert len(stage.database.settled) == 30
    assert min(later - sooner for sooner, later in itertools.pairwise(turns)) >= 0.0199


def test_turns_that_get_all_that_they_ask_for_follow_each_other_at_once(stage: Stage) -> None:
    stage.database.put(count=200)

    stage.run(seconds=3, turn_interval=20, batch_size=10)

    took = max(at for _, _, at in stage.dispatcher.sent) - 1000
    assert took < 200 / 10 * 0.02 * 0.75


def test_a_receiver_that_is_done_before_the_next_turn_gets_it_at_once(stage: Stage) -> None:
    stage.database.put(count=600)
    stage.dispatcher.answer = lambda to, messages: (0.0005, DELIVERED)

    stage.run(seconds=5, turn_interval=20)

    took = max(at for _, _, at in stage.dispatcher.sent) - 1000
    # A turn that only fills the slots, every 20 ms, would take twice as long.
    assert took < 600 / 14 * 0.02 / 2


@pytest.mark.parametrize("rate", [2, 10, 100, 1000])
def test_a_backlog_leaves_at_the_rate_that_its_endpoint_is_limited_to(stage: Stage, rate: int) -> None:
    stage.database.put(count=5 * rate)
    stage.database.rates[1] = rate

    stage.run(seconds=8)

    took = max(at for _, _, at in stage.dispatcher.sent) - 1000
    assert len(stage.database.settled) == 5 * rate
    assert took < 5 * 1.1
    # What a limit holds back is no backlog.
    assert len([at for at in stage.database.times("turn") if at < 1005]) <= 5 / 0.005 * 1.1


def test_a_slow_receiver_is_refilled_without_waiting_for_a_full_group(stage: Stage) -> None:
    stage.database.put(count=600)
    delays = iter([0.05 + n % 16 * 0.003 for n in range(600)])
    stage.dispatcher.answer = lambda to, messages: (next(delays), DELIVERED)

    stage.run(seconds=5)

    # Fourteen at once, at 74 ms on average and 5 ms for the group.
    assert len(stage.database.settled) == 600
    assert max(stage.database.times("settle")) - 1000 < 600 / 14 * 0.074 * 1.15


def test_a_receiver_that_takes_its_time_gets_all_slots_within_milliseconds(stage: Stage) -> None:
    stage.database.put(count=300)
    stage.dispatcher.answer = lambda to, messages: (0.05, DELIVERED)

    stage.run(worker_concurrency=128)

    assert len([at for _, _, at in stage.dispatcher.sent if at < 1000.01]) == 128
    assert len(stage.database.settled) == 300


def test_requests_prefetched_for_a_receiver_that_hangs_cost_nothing(stage: Stage) -> None:
    stage.database.put(count=1000)
    stage.dispatcher.answer = lambda to, messages: (0.0002 if messages[0].id <= 600 else 60, DELIVERED)
    steps: list[int] = []
    stage.database.hooks["report"] = lambda progress: steps.append(stage.dispatcher.steps)

    stage.run(seconds=6, worker_concurrency=128)

    assert 600 + 128 <= len(stage.dispatcher.sent) < 1000
    # A report comes once a second. For three seconds after the last claim new messages are looked for often.
    assert all(later - sooner <= 75 for sooner, later in itertools.pairwise(steps[5:10]))


def test_the_next_of_an_ordering_key_is_claimed_as_soon_as_its_head_is_settled(stage: Stage) -> None:
    ids = stage.database.put(count=50, ordering_key="k")
    hidden = stage.database.pending[1:]
    stage.database.pending = stage.database.pending[:1]

    def promote(outcomes: Outcomes) -> None:
        stage.database.pending.append(hidden.pop(0)) if hidden else None

    stage.database.hooks["settle"] = promote
    stage.run(poll_interval=1000, poll_interval_busy=1000)

    assert stage.dispatcher.ids() == ids
    assert max(stage.database.times("settle")) - 1000 < 50 * 0.002


def test_a_config_that_our_code_cannot_read_fails_its_own_messages(stage: Stage) -> None:
    bad, good = stage.database.put(1), stage.database.put(2)
    stage.database.configs[1] = {"url": "http://127.0.0.1/", "headers": None}

    stage.run()

    assert (stage.database.settled[bad[0]].error or "").startswith("[RETRYABLE] config: ")
    assert stage.database.settled[good[0]].error is None


def test_an_endpoint_that_is_gone_fails_its_messages(stage: Stage) -> None:
    (id,) = stage.database.put(1)
    del stage.database.configs[1]

    stage.run()

    assert stage.database.settled[id].error == "[RETRYABLE] config: the endpoint is gone"


def test_a_changed_config_holds_for_the_next_message(stage: Stage) -> None:
    stage.database.put(1)

    def change(progress: object) -> None:
        if len(stage.dispatcher.sent) == 1:
            stage.database.configs[1] = {"url": "http://127.0.0.1/new"}
            stage.database.versions[1] = 2
            stage.database.put(1, count=2)

    stage.database.hooks["report"] = change
    stage.run(seconds=2)

    assert [to.target.profile.url for to, _, _ in stage.dispatcher.sent] == ["http://127.0.0.1/"] + [
        "http://127.0.0.1/new"
    ] * 2
    assert len(stage.database.times("endpoint_configs")) == 2


def test_big_payloads_are_taken_a_few_at_a_time(stage: Stage) -> None:
    megabytes = "x" * (PAYLOAD_BYTES // 5)
    ids = stage.database.put(count=12, payload=megabytes)
    stage.dispatcher.answer = lambda to, messages: (0.3, DELIVERED)
    most = 0

    def count(progress: Mapping[str, Any]) -> None:
        nonlocal most
        most = max(most, progress["in_flight"])

    stage.database.hooks["report"] = cast(Any, count)
    stage.database.hooks["settle"] = lambda outcomes: None
    stage.run(seconds=10)

    # The first claim doesn't know yet; after it there are never more than five.
    assert stage.dispatcher.ids() == ids
    assert stage.database.wishes[0].most == 64
    assert all(wish.most <= 5 for wish in stage.database.wishes[1:])


def test_slow_receivers_leave_all_slots_to_the_others(stage: Stage) -> None:
    for endpoint_id in range(1, 7):
        stage.database.put(endpoint_id, count=100)
    stage.dispatcher.answer = lambda to, messages: (60.0 if to.id < 7 else 0.001, DELIVERED)
    quick: list[int] = []

    def flow(progress: object) -> None:
        quick.extend(stage.database.put(7, count=5))

    stage.database.hooks["report"] = flow
    stage.run(seconds=10)

    sent = {id: at for to, ids, at in stage.dispatcher.sent for id in ids if to.id == 7}
    # Without those of the last moment.
    assert set(quick[:-10]) <= set(sent)
    assert all(id in stage.database.settled for id in quick[:-10])
    assert max(Counter(to.id for to, _, _ in stage.dispatcher.sent if to.id < 7).values()) <= 14


@pytest.mark.parametrize(("state", "seconds"), [("open", 10), ("half_open", 5), ("disabled", 10)])
def test_what_waits_when_the_circuit_opens_goes_back(stage: Stage, state: str, seconds: float) -> None:
    ids = stage.database.put(1, count=60) + stage.database.put(2, count=60)
    stage.dispatcher.answer = lambda to, messages: (0.02, DELIVERED if to.id > 1 else Outcome("[RETRYABLE] HTTP 500"))

    def open_circuit(outcomes: Outcomes) -> None:
        if outcomes.errors and len(stage.dispatcher.sent) > 40:
            stage.database.blocked[1] = state
            stage.database.pending = [each for each in stage.database.pending if each.endpoint_id != 1]

    stage.database.hooks["settle"] = open_circuit
    stage.run(seconds=6)

    assert set(stage.database.released.values()) == {seconds}
    of_first = {id for to, sent, _ in stage.dispatcher.sent for id in sent if to.id == 1}
    assert of_first and not of_first & set(stage.database.released)
    assert set(ids[60:]) <= set(stage.database.settled)


def test_a_receiver_that_never_answered_has_no_more_in_hand_than_under_way(stage: Stage) -> None:
    stage.database.put(1, count=3000)
    for endpoint_id in range(2, 22):
        stage.database.put(endpoint_id, count=100)
    stage.dispatcher.answer = lambda to, messages: (0.001 if to.id == 1 else 60.0, DELIVERED)

    stage.run(seconds=2, worker_concurrency=28)

    # The fast one is done, and had as much ahead as it may; none of the others got more than its share of the slots.
    assert all(id in stage.database.settled for id in range(1, 3001))
    assert max(wish.rooms.get(1, 0) for wish in stage.database.wishes) > 28
    hanging = [wish.rooms.get(each, wish.room) for wish in stage.database.wishes for each in range(2, 22)]
    assert max(hanging) <= 28


def test_a_backlog_goes_on_while_claims_end_among_others_that_have_nothing(stage: Stage) -> None:
    stage.database.put(1, count=3000)
    stage.dispatcher.answer = lambda to, messages: (0.001, DELIVERED)
    claim = stage.database.claim

    def end_early(wish: Wish) -> tuple[list[Claimed], bool]:
        # The first claim of all gets to the endpoint; those after it end before.
        return ([], True) if wish.endpoint_ids is None and stage.database.wishes else claim(wish)

    stage.database.claim = end_early  # type: ignore[method-assign]
    stage.run(seconds=4)

    assert len(stage.database.settled) == 3000


def test_a_round_that_a_sender_began_is_finished_without_waiting(stage: Stage) -> None:
    stage.database.put(1)
    claim, vain = stage.database.claim, iter(range(100))

    def end_early(wish: Wish) -> tuple[list[Claimed], bool]:
        # Others have to be visited first, by a hundred claims of 8 ms.
        stage.clock.now += 0.008
        return claim(wish) if next(vain, None) is None else ([], True)

    stage.database.claim = end_early  # type: ignore[method-assign]
    began = stage.clock.now
    stage.run(seconds=5)

    ((_, _, sent),) = stage.dispatcher.sent
    assert sent - began < 1.35


def test_without_senders_the_worker_looks_five_times_a_second(stage: Stage) -> None:
    # The first rounds are for messages that were sent before the worker began.
    begins = stage.clock.now + 1
    claims: list[float] = []

    def end_early(wish: Wish) -> tuple[list[Claimed], bool]:
        # There is nothing new; then no endpoint is visited.
        if wish.behind is not None or stage.clock.now < begins:
            return [], False
        claims.append(stage.clock.now)
        return [], True

    stage.database.claim = end_early  # type: ignore[method-assign]
    stage.run(seconds=10)

    # Five in a second.
    assert 40 <= len(claims) <= 50


@pytest.mark.parametrize(("limit", "is_reached"), [(None, False), (1000, False), (4, True)])
def test_answers_are_stored_sooner_where_a_limit_in_flight_may_hold_others_up(
    stage: Stage, limit: int | None, is_reached: bool
) -> None:
    config = {"url": "http://127.0.0.1/"} | ({} if limit is None else {"max_in_flight": limit})
    stage.database.configs[1] = config
    stage.database.put(1, count=400)
    stage.dispatcher.answer = lambda to, messages: (0.001 * (1 + messages[0].id % 7), DELIVERED)
    stage.run(seconds=5)

    assert len(stage.database.settled) == 400
    assert (len(stage.database.times("settle")) > 25) == is_reached


def test_requests_prefetched_for_many_that_hang_do_not_hold_up_the_others(stage: Stage) -> None:
    for _ in range(40):
        for endpoint_id in range(1, 201):
            stage.database.put(endpoint_id)
    hangs = stage.clock.now + 0.1

    def answer(to: Endpoint, messages: Sequence[Message]) -> tuple[float, Outcome]:
        return 60.0 if to.id <= 60 and stage.clock.now > hangs else 0.001, DELIVERED

    stage.dispatcher.answer = answer
    began = stage.clock.now
    stage.run(seconds=20, worker_concurrency=128)

    others = [at for to, _, at in stage.dispatcher.sent if to.id > 60]
    assert len(others) == 140 * 40
    # Half a second until they are seen to be slow.
    assert max(others) - began < 1


def test_statistics_of_many_endpoints_are_stored_in_parts_and_all_of_them_in_the_end(stage: Stage) -> None:
    stored: list[tuple[int, int]] = []
    processed = 0

    def report(progress: Mapping[str, Any], statistics: Sequence[Mapping[str, Any]]) -> None:
        nonlocal processed
        processed += progress["processed"]
        stored.append((len(statistics), sum(each["delivered"] for each in statistics)))
        if processed < 8000:
            for endpoint_id in range(1, 4001):
                stage.database.put(endpoint_id)

    stage.database.report = report  # type: ignore[method-assign]
    stage.run(seconds=9, worker_concurrency=700)

    # The worker was seen alive each second.
    assert len(stored) >= 9
    assert max(endpoints for endpoints, _ in stored[:-1]) == STATISTICS_AT_ONCE
    assert sum(count for _, count in stored) == processed >= 8000


def test_a_worker_takes_back_what_others_left_before_it_claims(stage: Stage) -> None:
    stage.database.put()

    stage.run(seconds=1)

    names = [name for name, _ in stage.database.calls]
    assert names.index("sweep") < names.index("claim")
