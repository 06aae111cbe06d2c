"""The worker in light traffic, where senders wake it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.stage import FakeWakeUp, Stage
from ulak.messages.delivery import DELIVERED, Message, Outcome
from ulak.worker.port import Busy, Claimed, Turn
from ulak.worker.tuning import CHECK_SECONDS, LOOK_SECONDS, SETTLE_SECONDS


@pytest.fixture
def light(stage: Stage) -> Stage:
    stage.database.wake_up = FakeWakeUp(stage.clock)
    return stage


def send_at(stage: Stage, *times: float, **message: Any) -> None:
    assert stage.database.wake_up is not None
    for time in times:
        stage.database.wake_up.at(1000 + time, lambda: stage.database.put(**message))


def sent_at(stage: Stage) -> list[float]:
    return [round(at - 1000, 3) for _, _, at in stage.dispatcher.sent]


def test_a_message_is_sent_when_its_sender_notifies(light: Stage) -> None:
    times = [0.5 + 0.03 * n for n in range(50)]
    send_at(light, *times)

    light.run(seconds=3)

    assert sent_at(light) == [round(time, 3) for time in times]
    # One for each of them, and those that look for messages without a notification or store the last outcomes.
    assert len(light.database.times("turn")) < 50 + 3 / 0.2 + 10


def test_deliveries_are_stored_together_with_a_later_claim(light: Stage) -> None:
    send_at(light, *[0.5 + 0.03 * n for n in range(20)])

    light.run(seconds=1.1)

    assert len(light.database.settled) == 20
    assert len(light.database.times("settle")) < 12


def test_a_delivery_does_not_wait_long_for_a_next_claim(light: Stage) -> None:
    send_at(light, 0.5)

    light.run(seconds=2)

    (stored,) = light.database.times("settle")
    assert 1000.5 < stored <= 1000.5 + SETTLE_SECONDS + 0.002


@pytest.mark.parametrize(
    ("message", "outcome", "seconds"),
    [({}, Outcome("[RETRYABLE] HTTP 500"), 0.005), ({"ordering_key": "k"}, DELIVERED, 0.001)],
    ids=["a failure", "one that another waits for"],
)
def test_an_outcome_that_another_message_waits_for_is_stored_at_once(
    light: Stage, message: dict[str, Any], outcome: Outcome, seconds: float
) -> None:
    light.dispatcher.answer = lambda to, messages: (0.001, outcome)
    send_at(light, 0.5, **message)

    light.run(seconds=2)

    assert [round(at - 1000, 3) for at in light.database.times("settle")] == [0.5 + seconds]


def test_in_dense_traffic_the_worker_polls_and_asks_few_senders_to_notify(light: Stage) -> None:
    send_at(light, *[0.5 + 0.001 * n for n in range(1000)])
    asked: list[float] = []
    turn = light.database.turn

    def note(outcomes: Any, wish: Any, lease: float, wake_ups: bool) -> Turn:
        asked.extend([light.clock.now] if wake_ups and 1000.55 < light.clock.now < 1001.5 else [])
        return turn(outcomes, wish, lease, wake_ups)

    light.database.turn = note  # type: ignore[method-assign]
    light.run(seconds=2)

    assert len(light.database.settled) == 1000
    assert len(asked) < 10
    assert len([at for at in light.database.times("turn") if 1000.5 < at < 1001.5]) <= 1 / 0.005 + 5


def test_a_worker_begins_to_listen_only_with_a_claim(light: Stage) -> None:
    """A sender that drew its id before the turn asked, and committed after the claim before it, doesn't notify."""
    chance = random.Random(1)
    send_at(light, *itertools.accumulate([chance.uniform(0.0005, 0.008) for _ in range(2000)], initial=0.5))
    asked: list[tuple[bool, bool]] = []
    turn = light.database.turn

    def note(outcomes: Any, wish: Any, lease: float, wake_ups: bool) -> Turn:
        asked.extend([(wish is None, light.worker._state.senders.is_listening)] if wake_ups else [])
        return turn(outcomes, wish, lease, wake_ups)

    light.database.turn = note  # type: ignore[method-assign]
    light.run(seconds=12)

    assert (False, False) in asked
    assert (True, False) not in asked


def test_a_turn_without_a_claim_leaves_a_wake_up_to_the_next_one(light: Stage) -> None:
    light.run(seconds=1)
    assert light.worker is not None
    senders = light.worker._state.senders
    senders.was_notified = True

    senders.followed(Turn([], False, senders.last_sent), None, [], True, light.clock.now)

    assert senders.was_notified


def test_a_claim_of_new_messages_forgets_no_backlog(light: Stage) -> None:
    light.run(seconds=1)
    assert light.worker is not None
    turns, message = light.worker._turns, Message(1, "m1", 1, "{}")
    turns._have_more = {1: True}
    wish = turns._wish(light.clock.now)

    turns._note_more(Turn([Claimed(1, 1, [message])], False, 1), wish._replace(behind=0), 1, light.clock.now)
    assert turns._have_more == {1: True}
    turns._note_more(Turn([Claimed(1, 1, [message])], False, 1), wish._replace(behind=None), 1, light.clock.now)
    assert turns._have_more == {}


def test_a_worker_that_is_no_longer_the_poller_leaves_listening_to_another(light: Stage) -> None:
    light.database.poller_until = light.clock.now + 1

    light.run(seconds=3)

    assert light.database.wake_up is not None
    assert len(light.database.times("unlisten")) == 1
    assert not light.database.wake_up.is_held_back


def test_while_nothing_waits_a_worker_that_is_notified_looks_once_a_second(light: Stage) -> None:
    light.run(seconds=10)

    assert 9 <= len(light.database.times("turn")) <= 14
    # But it returns to PostgreSQL often enough to notice a cancel.
    assert light.dispatcher.longest_wait <= CHECK_SECONDS


def test_a_message_without_a_notification_is_found_within_a_second(light: Stage) -> None:
    assert light.database.wake_up is not None
    # An id beyond those that are to notify.
    light.database.wake_up.at(1005.1, lambda: [light.database.put()[0] + 10**9])

    light.run(seconds=10)

    (found,) = sent_at(light)
    assert 5.1 < found <= 6.2


def test_wake_ups_for_others_soon_cost_little(light: Stage) -> None:
    assert light.database.wake_up is not None
    for n in range(1000):
        light.database.wake_up.at(1000.1 + n * 0.01, list)

    light.run(seconds=12)

    looked = [wish for wish in light.database.wishes if wish.behind is None]
    assert len(looked) < 20 + 12 / 0.2 + 5


def send_late(stage: Stage, drawn: float, others: Sequence[float], committed: float) -> None:
    """A sender draws its id before others send, and commits and notifies after them."""
    database = stage.database
    assert database.wake_up is not None
    ids: list[int] = []

    def draw_id() -> list[int]:
        database.sent += 1
        ids.append(database.sent)
        # There is no notification before the commit.
        return [10**9]

    def commit() -> list[int]:
        last_sent, database.sent = database.sent, ids[0] - 1
        found = database.put()
        database.sent = last_sent
        return found

    database.wake_up.at(1000 + drawn, draw_id)
    send_at(stage, *others)
    database.wake_up.at(1000 + committed, commit)


def test_a_sender_that_draws_an_id_and_commits_late_is_found_when_it_notifies(light: Stage) -> None:
    send_at(light, 0.5, 0.53, 0.56)
    send_late(light, drawn=0.6, others=[], committed=0.99)

    light.run(seconds=2)

    assert sent_at(light) == [0.5, 0.53, 0.56, 0.99]


def test_senders_that_roll_back_leave_others_that_notify(light: Stage) -> None:
    def roll_back() -> list[int]:
        """Draws an id and notifies nobody."""
        light.database.sent += 1
        return [light.database.sent + 1000]

    # No turn stores an outcome and asks senders again.
    light.dispatcher.answer = lambda to, messages: (5.0, DELIVERED)
    times = [round(0.5 + 0.02 * n, 3) for n in range(10)]
    for n, time in enumerate(times):
        send_at(light, time, endpoint_id=n + 1)
    assert light.database.wake_up is not None
    for n in range(6):
        light.database.wake_up.at(1000.7 + 0.001 * n, roll_back)
    send_at(light, 0.71)

    light.run(seconds=2)

    assert sent_at(light) == [*times, 0.71]


def test_a_sender_that_commits_late_just_after_a_look_is_found_by_the_next_one_which_comes_soon(light: Stage) -> None:
    # The worker looks at 0.2 and 1.2, since nothing waits.
    send_late(light, drawn=0.93, others=[1.03, 1.13], committed=1.33)

    light.run(seconds=3)

    assert sent_at(light)[:2] == [1.03, 1.13]
    assert 1.33 < sent_at(light)[2] <= 1.33 + LOOK_SECONDS


def test_a_wake_up_without_a_message_leads_to_a_check(light: Stage) -> None:
    assert light.database.wake_up is not None

    def stop() -> list[int]:
        light.database.leave = "stop"
        return []

    light.database.wake_up.at(1000.5, stop)

    assert light.run(seconds=60) == "stop"

    assert light.clock.now - 1000.5 < 0.01


def test_a_stop_without_a_notification_is_noticed_too(light: Stage) -> None:
    light.database.hooks["report"] = lambda progress: setattr(light.database, "leave", "stop")

    assert light.run(seconds=60) == "stop"

    assert light.clock.now - 1000 < 1.5


def test_a_worker_that_ends_lets_go_of_the_wake_up(light: Stage) -> None:
    light.run(seconds=1)

    assert light.database.wake_up is not None
    assert not light.database.wake_up.is_held_back


def test_a_worker_whose_slots_are_all_taken_waits_for_one(light: Stage) -> None:
    light.dispatcher.answer = lambda to, messages: (0.5, DELIVERED)
    send_at(light, *[0.1 + 0.02 * n for n in range(10)])

    light.run(seconds=8, worker_concurrency=1)

    assert len(light.database.settled) == 10
    assert len(light.database.calls) < 500


def test_a_run_that_is_over_is_not_woken(light: Stage) -> None:
    light.dispatcher.answer = lambda to, messages: (2.0, DELIVERED)
    send_at(light, 0.5, 1.5, 1.6)

    light.run(seconds=1)

    assert light.dispatcher.ids() == [1]
    assert light.database.settled.keys() == {1}
    assert len(light.database.calls) < 1000


@pytest.mark.parametrize("outcome", [Outcome("[RETRYABLE] HTTP 500"), Outcome(response="{}")])
def test_an_answer_that_comes_with_a_notification_is_stored_as_it_is(light: Stage, outcome: Outcome) -> None:
    light.dispatcher.answer = lambda to, messages: (0.01, outcome if messages[0].id == 1 else DELIVERED)
    # The second sender notifies at the very moment of the first answer.
    send_at(light, 0.5, 0.51, 0.54)

    light.run(seconds=2)

    assert light.database.settled == {1: outcome, 2: Outcome(), 3: Outcome()}


@pytest.mark.parametrize("call", ["turn", "claim", "settle", "report", "check"])
def test_a_database_that_is_busy_in_light_traffic_stops_nothing(light: Stage, call: str) -> None:
    def fail(*arguments: Any) -> None:
        if light.clock.now < 1001:
            raise Busy

    light.database.hooks[call] = fail
    send_at(light, *[0.5 + 0.03 * n for n in range(30)])

    light.run(seconds=4)

    assert len(light.dispatcher.ids()) == len(light.database.settled) == 30
    assert light.database.released == {}
