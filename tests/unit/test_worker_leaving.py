"""The worker when its time is over, or when it is told to leave."""

from __future__ import annotations

import pytest
from support.stage import Stage
from ulak.messages.delivery import DELIVERED
from ulak.worker.port import Busy, Outcomes
from ulak.worker.tuning import GRACE_SECONDS, STOP_SECONDS


def test_a_run_waits_for_what_is_under_way_and_serves_others_meanwhile(stage: Stage) -> None:
    slow = stage.database.put(1, count=2)
    stage.dispatcher.answer = lambda to, messages: (9.0 if to.id == 1 else 0.001, DELIVERED)

    def flow(progress: object) -> None:
        stage.database.put(1)
        stage.database.put(2)

    stage.database.hooks["report"] = flow
    assert stage.run(seconds=2) == "over"

    assert set(slow) <= set(stage.database.settled)
    assert 9 <= stage.clock.now - 1000 < 14
    # The slow one got nothing more after the run's time was over, the other one did.
    assert max(at for to, _, at in stage.dispatcher.sent if to.id == 1) < 1002
    assert max(at for to, _, at in stage.dispatcher.sent if to.id == 2) > 1007
    assert stage.database.released == {}


def test_a_run_whose_outcomes_cannot_be_stored_ends_all_the_same(stage: Stage) -> None:
    (id,) = stage.database.put()

    def busy(outcomes: Outcomes) -> None:
        raise Busy

    stage.database.hooks["settle"] = busy
    stage.run(seconds=1)

    assert stage.clock.now - 1000 < 1 + GRACE_SECONDS + 1
    # It was delivered: giving it back would deliver it again at once.
    assert id not in stage.database.released


def test_a_worker_that_is_told_to_stop_gives_back_what_hangs(stage: Stage) -> None:
    ids = stage.database.put(count=3)
    stage.dispatcher.answer = lambda to, messages: (0.5 if messages[0].id == ids[0] else 30.0, DELIVERED)
    stage.database.hooks["report"] = lambda progress: setattr(stage.database, "leave", "stop")

    assert stage.run(seconds=60) == "stop"

    assert stage.clock.now - 1000 < STOP_SECONDS + 0.3
    assert set(stage.database.settled) == {ids[0]}
    assert stage.database.released == dict.fromkeys(ids[1:], 0.0)


@pytest.mark.parametrize(("leave", "settings", "reason"), [("restart", "", "restart"), (None, "new", "settings")])
def test_a_worker_that_has_to_begin_anew_leaves_in_good_order(
    stage: Stage, leave: str | None, settings: str, reason: str
) -> None:
    ids = stage.database.put(count=3)
    stage.dispatcher.answer = lambda to, messages: (4.0, DELIVERED)

    def tell(progress: object) -> None:
        stage.database.leave, stage.database.settings = leave, settings

    stage.database.hooks["report"] = tell
    assert stage.run(seconds=60) == reason

    assert set(stage.database.settled) == set(ids)
    assert stage.clock.now - 1000 < 5


def test_a_run_that_breaks_off_stores_what_is_done_and_gives_back_the_rest(stage: Stage) -> None:
    ids = stage.database.put(count=3)
    stage.dispatcher.answer = lambda to, messages: (0.001 if messages[0].id == ids[0] else 30.0, DELIVERED)

    class Cancelled(Exception):
        pass

    def cancel(outcomes: Outcomes) -> None:
        del stage.database.hooks["settle"]
        raise Cancelled

    stage.database.hooks["settle"] = cancel
    with pytest.raises(Cancelled):
        stage.run()
    assert stage.worker is not None
    stage.worker.store()
    stage.worker.give_back()
    stage.worker.report_end("cancelled", {})

    assert set(stage.database.settled) == {ids[0]}
    assert set(stage.database.released) == set(ids[1:])
