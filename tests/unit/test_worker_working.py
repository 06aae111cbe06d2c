"""The worker while it has something to do: claims, request slots, prefetching."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from support.stage import Stage
from ulak.messages.delivery import DELIVERED, Endpoint, Message, Outcome
from ulak.worker.port import Claimed, Outcomes
from ulak.worker.tuning import CLAIM_ENDPOINTS_MOST, LEAST_WINDOW, PAYLOAD_BYTES


def test_every_message_is_sent_and_settled_once(stage: Stage) -> None:
    ids = stage.database.put(count=1000)

    assert stage.run() == "over"

    assert sorted(stage.dispatcher.ids()) == ids
    assert stage.database.settled == dict.fromkeys(ids, Outcome())
    assert stage.database.released == {}


def test_outcomes_are_settled_in_groups_and_slots_are_filled_with_them(stage: Stage) -> None:
    stage.database.put(1, count=500)
    stage.database.put(2, count=500)

    stage.run()

    # Sixteen slots, which are filled with prefetched requests; so groups are larger than that.
    assert len(stage.database.times("settle")) < 40
    assert len(stage.database.times("claim")) < 40 + 25
    assert stage.database.limits[0] == 16


def test_a_slow_receiver_is_refilled_without_waiting_for_a_full_group(stage: Stage) -> None:
    stage.database.put(count=600)
    delays = iter([0.05 + n % 16 * 0.003 for n in range(600)])
    stage.dispatcher.answer = lambda to, messages: (next(delays), DELIVERED)

    stage.run(seconds=5)

    # Fourteen at once, at 74 ms on average and 5 ms for the group.
    assert len(stage.database.settled) == 600
    assert max(stage.database.times("settle")) - 1000 < 600 / 14 * 0.074 * 1.15


def test_a_receiver_that_answers_at_once_gets_a_few_at_a_time(stage: Stage) -> None:
    stage.database.put(count=2000)
    stage.dispatcher.answer = lambda to, messages: (0.0002, DELIVERED)

    stage.run(worker_concurrency=128)

    assert len(stage.database.settled) == 2000
    times = Counter(at for _, _, at in stage.dispatcher.sent)
    assert max(times.values()) <= LEAST_WINDOW


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
    assert all(later - sooner <= 25 for sooner, later in itertools.pairwise(steps[5:10]))


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


@pytest.mark.parametrize(("state", "seconds"), [("open", 10), ("half_open", 5), ("disabled", 10)])
def test_what_is_prefetched_when_the_circuit_opens_goes_back(stage: Stage, state: str, seconds: float) -> None:
    for endpoint_id in range(1, 5):
        stage.database.configs[endpoint_id] = {"url": "http://127.0.0.1/", "batch_size": 2}
        stage.database.versions[endpoint_id] = 1
        stage.database.put(endpoint_id)
    stage.dispatcher.answer = lambda to, messages: (0.2, DELIVERED if to.id > 1 else Outcome("[RETRYABLE] HTTP 500"))

    def flood(progress: object) -> None:
        if not stage.database.pending and stage.clock.now < 1001.5:
            for endpoint_id in range(1, 5):
                stage.database.put(endpoint_id, count=60)

    def open_circuit(outcomes: Outcomes) -> None:
        if outcomes.errors and len(stage.dispatcher.sent) > 4:
            stage.database.blocked[1] = state

    stage.database.hooks["report"] = flood
    stage.database.hooks["settle"] = open_circuit
    stage.run(seconds=6)

    assert set(stage.database.released.values()) == {seconds}
    of_first = {id for to, ids, _ in stage.dispatcher.sent for id in ids if to.id == 1}
    assert not of_first & set(stage.database.released)
    assert len(stage.database.settled) + len(stage.database.released) == stage.database.sent


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
    assert stage.database.limits[0] == 16
    assert all(limit <= 5 for limit in stage.database.limits[1:])


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
    assert set(quick[:-5]) <= set(sent)
    assert all(id in stage.database.settled for id in quick[:-5])
    assert max(Counter(to.id for to, _, _ in stage.dispatcher.sent if to.id < 7).values()) <= 14


def test_only_fast_endpoints_are_claimed_ahead_of_free_slots(stage: Stage) -> None:
    stage.database.put(1, count=3000)
    for endpoint_id in range(2, 22):
        stage.database.put(endpoint_id, count=20)
    stage.dispatcher.answer = lambda to, messages: (0.001 if to.id == 1 else 60.0, DELIVERED)
    waiting: list[int] = []

    def count(outcomes: Outcomes) -> None:
        unclaimed = sum(each.endpoint_id > 1 for each in stage.database.pending)
        waiting.append(400 - unclaimed - sum(to.id > 1 for to, _, _ in stage.dispatcher.sent))

    stage.database.hooks["settle"] = count
    stage.run(seconds=2, worker_concurrency=28)

    # The fast one is done; of the others nothing was taken that could not be sent.
    assert all(id in stage.database.settled for id in range(1, 3001))
    assert max(stage.database.limits) > 32
    assert max(waiting) == 0


def test_others_are_looked_after_while_one_has_a_backlog_and_less_often_if_that_takes_long(stage: Stage) -> None:
    stage.dispatcher.answer = lambda to, messages: (0.001, DELIVERED)
    counts = []
    for seconds in (0.0, 0.03):
        stage.database.put(1, count=20_000)
        stage.database.full_claim_seconds = seconds
        stage.database.full_claims.clear()
        stage.run(seconds=1)
        # How fast the receiver is has to be learnt first.
        learnt = stage.clock.now - 0.7
        counts.append(len([at for at in stage.database.full_claims if at > learnt]))

    quick, slow = counts
    assert quick >= 14
    # Thirty milliseconds twenty times would be all that there is.
    assert slow <= 5


def test_a_claim_visits_more_endpoints_where_each_has_little(stage: Stage) -> None:
    for endpoint_id in range(1, 1001):
        stage.database.put(endpoint_id, count=1)
    stage.run(seconds=5, worker_concurrency=700)

    assert len(stage.database.settled) == 1000
    visited = stage.database.most_endpoints
    assert visited[:5] == [16, 32, 64, 128, CLAIM_ENDPOINTS_MOST]
    assert max(visited) == CLAIM_ENDPOINTS_MOST
    assert visited[-1] == visited[0]


def test_a_claim_visits_fewer_endpoints_step_by_step_where_they_fill_it(stage: Stage) -> None:
    for endpoint_id in range(1, 601):
        stage.database.put(endpoint_id, count=2)
    stage.run(seconds=5, worker_concurrency=150)

    assert len(stage.database.settled) == 1200
    steps = set(itertools.pairwise(stage.database.most_endpoints))
    assert all(after in (before, 2 * before, before // 2) for before, after in steps)
    assert any(after == before // 2 for before, after in steps)


def test_no_more_is_prefetched_in_turn_than_is_sent_soon(stage: Stage) -> None:
    """By a machine too slow to use all of its slots: it sends 2,000 a second, 100 in the time that it looks ahead."""
    for _ in range(10):
        for endpoint_id in range(1, 501):
            stage.database.put(endpoint_id)
    held: list[int] = []

    def answer(to: Endpoint, messages: Sequence[Message]) -> tuple[float, Outcome]:
        stage.clock.now += 0.0005
        return 0.001, DELIVERED

    def count(outcomes: Outcomes) -> None:
        held.append(5000 - len(stage.database.pending) - len(stage.database.settled))

    stage.dispatcher.answer = answer
    stage.database.hooks["settle"] = count
    stage.run(seconds=60, worker_concurrency=128)

    assert len(stage.database.settled) == 5000
    assert max(held) <= 2 * 128


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


def test_a_backlog_goes_on_while_full_claims_end_among_others_that_have_nothing(stage: Stage) -> None:
    stage.database.put(1, count=3000)
    stage.dispatcher.answer = lambda to, messages: (0.001, DELIVERED)
    claim = stage.database.claim

    def end_early(*given: Any) -> tuple[list[Claimed], bool]:
        # The first full claim gets to the endpoint; those after it end before.
        endpoint_ids = given[4]
        return ([], True) if endpoint_ids is None and stage.database.full_claims else claim(*given)

    stage.database.claim = end_early  # type: ignore[method-assign]
    stage.run(seconds=2)

    assert len(stage.database.settled) == 3000


def test_a_round_that_a_sender_began_is_finished_without_waiting(stage: Stage) -> None:
    stage.database.put(1)
    claim, vain = stage.database.claim, iter(range(100))

    def end_early(*given: Any) -> tuple[list[Claimed], bool]:
        # Others have to be visited first, by a hundred claims of 8 ms.
        stage.clock.now += 0.008
        return claim(*given) if next(vain, None) is None else ([], True)

    stage.database.claim = end_early  # type: ignore[method-assign]
    began = stage.clock.now
    stage.run(seconds=5)

    assert next(at for what, at in stage.database.calls if what == "settle") - began < 1.2


def test_a_look_that_no_sender_is_behind_is_one_part_of_a_round(stage: Stage) -> None:
    # The first rounds are for whoever may have sent before the worker began.
    begins = stage.clock.now + 1
    claims: list[float] = []

    def end_early(*given: Any) -> tuple[list[Claimed], bool]:
        if stage.clock.now >= begins:
            claims.append(stage.clock.now)
        return [], stage.clock.now >= begins

    stage.database.claim = end_early  # type: ignore[method-assign]
    stage.run(seconds=10)

    count = len(claims)
    # Three of the longest waits after each other.
    assert 30 <= count <= 70


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
    # 14 times where answers may wait for each other, 40 where they may not.
    assert (len(stage.database.times("settle")) > 25) == is_reached


def test_statistics_of_many_endpoints_are_stored_seldom_and_all_of_them_in_the_end(stage: Stage) -> None:
    stored: list[tuple[float, int]] = []
    processed = 0

    def report(progress: Mapping[str, Any], statistics: Sequence[Mapping[str, Any]]) -> None:
        nonlocal processed
        processed += progress["processed"]
        stored.append((stage.clock.now, sum(each["delivered"] for each in statistics)))
        if processed < 8000:
            for endpoint_id in range(1, 4001):
                stage.database.put(endpoint_id)

    stage.database.report = report  # type: ignore[method-assign]
    began = stage.clock.now
    stage.run(seconds=9, worker_concurrency=700)

    # The worker was seen alive each second; counts of 4,000 endpoints came after four.
    assert len(stored) >= 9
    assert sum(count for _, count in stored) == processed >= 8000
    assert next(at - began for at, count in stored if count) >= 4


def test_a_worker_takes_back_what_others_left_before_it_claims(stage: Stage) -> None:
    stage.database.put()

    stage.run(seconds=1)

    names = [name for name, _ in stage.database.calls]
    assert names.index("sweep") < names.index("claim")
