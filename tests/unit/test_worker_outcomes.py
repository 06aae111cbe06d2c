"""What the worker does with outcomes and leases, whatever goes wrong with the database."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from support.stage import Pending, Stage
from ulak.messages.delivery import DELIVERED, Message, Outcome
from ulak.worker.port import Busy, Outcomes, Refused
from ulak.worker.tuning import CHECK_SECONDS


def test_an_outcome_waits_out_a_lock_and_the_others_pass_it(stage: Stage) -> None:
    locked, free = stage.database.put(1, count=3), stage.database.put(2, count=3)
    unlocked_at = stage.clock.now + 3

    def lock(outcomes: Outcomes) -> None:
        stage.clock.now += 0.25 if set(outcomes.ids) & set(locked) else 0
        if stage.clock.now < unlocked_at and set(outcomes.ids) & set(locked):
            raise Busy

    stage.database.hooks["settle"] = lock
    more = []

    def send_more(progress: object) -> None:
        more.extend(stage.database.put(1) + stage.database.put(2))

    stage.database.hooks["report"] = send_more
    stage.run(seconds=6)

    assert stage.database.settled.keys() >= set(locked + free)
    # Nothing more is taken of an endpoint whose outcomes can't be stored.
    to_locked = [at for to, _, at in stage.dispatcher.sent if to.id == 1]
    assert [at for at in to_locked if 1001 < at < unlocked_at] == []
    assert len([at for to, _, at in stage.dispatcher.sent if to.id == 2 and 1001 < at < unlocked_at]) >= 1
    assert stage.database.released == {}
    # Each try waits for the lock and delays the others, so tries become rare.
    assert len(stage.database.times("settle")) < 30


def test_outcomes_that_are_stored_apart_are_stored_by_endpoint(stage: Stage) -> None:
    """In one transaction each: two workers that each lock one endpoint and want the other's would deadlock."""
    stage.database.put(1, count=3)
    stage.database.put(2, count=3)
    stored: list[set[int]] = []

    def settle(outcomes: Outcomes) -> None:
        endpoints = {to.id for to, ids, _ in stage.dispatcher.sent if set(ids) & set(outcomes.ids)}
        if len(endpoints) > 1:
            raise Busy
        stored.append(endpoints)

    stage.database.hooks["settle"] = settle
    stage.run(seconds=1)

    assert stored == [{1}, {2}]


def test_an_outcome_that_cannot_be_stored_is_stored_in_plain_words(stage: Stage) -> None:
    ids = stage.database.put(count=5)

    def refuse(outcomes: Outcomes) -> None:
        if any(outcomes.responses or []) or any(not (error or "").isascii() for error in outcomes.errors or []):
            raise Refused

    stage.database.hooks["settle"] = refuse
    stage.dispatcher.answer = lambda to, messages: (
        0.001,
        Outcome("[RETRYABLE] HTTP 500: caf\u00e9 \ud83d", 7, "{}") if messages[0].id == ids[2] else DELIVERED,
    )
    stage.run()

    expected = dict.fromkeys(ids, Outcome())
    expected[ids[2]] = Outcome("[RETRYABLE] HTTP 500: caf? ?", 7, None)
    assert stage.database.settled == expected


def test_responses_are_stored_a_few_megabytes_at_once_and_each_outcome_once(stage: Stage) -> None:
    ids = stage.database.put(count=10)
    stored: list[Outcomes] = []
    is_busy = iter([False, True])

    def settle(outcomes: Outcomes) -> None:
        if next(is_busy, False):
            raise Busy
        stored.append(outcomes)

    stage.database.hooks["settle"] = settle
    stage.dispatcher.answer = lambda to, messages: (0.001, Outcome(None, None, "x" * 1_500_000))
    stage.run(seconds=3)

    assert sorted(id for each in stored for id in each.ids) == ids
    assert max(len(each.ids) for each in stored) == 2


def test_a_message_that_cannot_be_settled_at_all_is_left_to_its_lease(stage: Stage) -> None:
    ids = stage.database.put(count=5)

    def refuse(outcomes: Outcomes) -> None:
        if ids[2] in outcomes.ids:
            raise Refused("no way")

    stage.database.hooks["settle"] = refuse
    stage.run(seconds=30)

    assert stage.database.settled.keys() == set(ids) - {ids[2]}
    assert stage.database.renewed[ids[2]] == 0
    assert ids[2] not in stage.database.released


@pytest.mark.parametrize("call", ["turn", "check", "report", "sweep", "renew", "endpoint_configs", "settle", "release"])
def test_a_database_that_is_busy_for_a_while_stops_nothing(stage: Stage, call: str) -> None:
    def busy(*_: object) -> None:
        if stage.clock.now < 1002:
            raise Busy

    stage.database.hooks[call] = busy
    ids = stage.database.put(count=20)

    assert stage.run(seconds=5, lease_seconds=5) == "over"

    back = set(stage.database.released)
    assert set(stage.database.settled) | back == set(ids)
    assert bool(back) == (call == "endpoint_configs")


def test_turns_that_fail_beside_a_backlog_keep_their_distance(stage: Stage) -> None:
    def fail() -> None:
        if 1000.05 <= stage.clock.now < 1000.55:
            stage.clock.now += 0.0005
            raise Busy

    stage.database.put(count=2000)
    stage.database.hooks["turn"] = fail
    stage.dispatcher.answer = lambda to, messages: (0.0005, DELIVERED)
    stage.run(seconds=3)

    failed = [at for at in stage.database.times("turn") if 1000.05 <= at < 1000.55]
    assert len(stage.database.settled) == 2000
    assert 10 < len(failed) <= 0.5 / 0.005 * 1.1


def test_leases_are_renewed_every_third_of_their_time(stage: Stage) -> None:
    (id,) = stage.database.put()
    stage.dispatcher.answer = lambda to, messages: (9.5, DELIVERED)

    stage.run(seconds=12, lease_seconds=6)

    assert stage.database.renewed[id] == 4
    assert id in stage.database.settled


def test_a_message_that_was_lost_and_comes_again_while_its_first_request_hangs_is_no_trouble(stage: Stage) -> None:
    (id,) = stage.database.put()
    delays = iter([3.0, 5.0])
    stage.dispatcher.answer = lambda to, messages: (next(delays), DELIVERED)
    stored: list[list[int]] = []

    def settle(outcomes: Outcomes) -> None:
        stored.append(list(outcomes.attempts))
        stage.database.settled.clear()

    def again(progress: object) -> None:
        if stage.clock.now > 1001 and len(stage.dispatcher.sent) == 1:
            stage.database.pending.append(Pending(1, Message(id, "m1", 2, "{}")))

    stage.database.hooks.update(settle=settle, report=again)
    stage.run(seconds=8, lease_seconds=6)

    assert stored == [[1], [2]]
    # The second claim is still held, and renewed, when the first one's answer comes.
    assert max(stage.database.times("renew")) > 1003


def test_what_was_lost_before_it_was_sent_is_not_sent(stage: Stage) -> None:
    for endpoint_id in (1, 2):
        stage.database.configs[endpoint_id] = {"url": "http://127.0.0.1/", "batch_size": 2}
        stage.database.versions[endpoint_id] = 1
        stage.database.put(endpoint_id)
    stage.dispatcher.answer = lambda to, messages: (4.0 if len(stage.dispatcher.sent) > 2 else 0.001, DELIVERED)

    def flood(progress: object) -> None:
        if stage.database.sent == 2:
            for endpoint_id in (1, 2):
                stage.database.put(endpoint_id, count=60)

    stage.database.hooks["report"] = flood
    stage.database.hooks["renew"] = lambda: stage.database.lost.update(set(range(1, 200)) - set(stage.dispatcher.ids()))
    stage.run(seconds=3, lease_seconds=5)

    assert len(stage.dispatcher.sent) < 62
    assert not set(stage.dispatcher.ids()) & stage.database.lost


def test_a_cancel_is_noticed_ten_times_a_second_even_if_everything_hangs(stage: Stage) -> None:
    stage.database.put(count=100)
    stage.dispatcher.answer = lambda to, messages: (30.0, DELIVERED)

    stage.run(seconds=20, poll_interval=5000)

    checks = stage.database.times("check")
    assert max(later - earlier for earlier, later in itertools.pairwise(checks)) <= 0.101
    assert stage.dispatcher.longest_wait <= CHECK_SECONDS


def test_a_failed_report_is_repeated_with_the_next(stage: Stage) -> None:
    stage.database.put(count=7)
    told: list[int] = []

    def report(progress: Mapping[str, Any]) -> None:
        if 1000.5 < stage.clock.now < 1002.5:
            raise Busy
        told.append(progress["processed"])

    stage.database.hooks["report"] = cast(Any, report)
    stage.run(seconds=4)

    assert sum(told) == 7
    assert json.dumps(told)
