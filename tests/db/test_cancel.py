"""Taking back what waits: cancelled messages are archived, shown as cancelled, and never delivered."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.messages import insert_messages
from support.queue import DB, Queue


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop", policy={"max_retries": 3, "backoff": "fixed", "base_delay_seconds": 10})
    return queue


def archived(queue: Queue, id: int) -> dict[str, Any]:
    (row,) = queue.rows("select * from ulak.archive where id = %s", id)
    return row


def story(queue: Queue, id: int) -> list[str]:
    return queue.column("select what from ulak.explain(%s)", id)


def cancelled_total(queue: Queue) -> float:
    return float(queue.value("select metric_value from ulak.metrics() where metric_name = 'messages_cancelled_total'"))


def test_a_waiting_message_is_cancelled_and_never_claimed(queue: Queue) -> None:
    id = queue.send()

    assert queue.call("cancel", id, now=queue.at(5)) is True

    assert queue.claim(10, now=10) == []
    assert queue.value("select status from ulak.message_status(%s)", id) == "cancelled"


def test_a_cancelled_message_is_archived_whole(queue: Queue) -> None:
    id = queue.send(
        payload={"order": 7}, priority=3, ordering_key="k", headers={"x-a": "b"}, metadata={"m": 1}, expires_at=600
    )
    before = queue.message(id)

    queue.call("cancel", id, now=queue.at(5))

    changed = {"status": "cancelled", "updated_at": queue.at(5), "archived_at": queue.at(5)}
    assert archived(queue, id) == {**before, **changed}
    assert queue.value("select count(*) from ulak.queue") == 0


def test_a_message_that_waits_for_a_retry_is_cancelled_with_its_attempts(queue: Queue) -> None:
    id = queue.send()
    queue.fail(queue.claim_one(), "no answer")

    assert queue.call("cancel", id, now=queue.at(5)) is True
    assert archived(queue, id)["attempts"] == 1
    assert "cancelled by postgres after 1 attempt" in story(queue, id)


def test_it_is_too_late_for_a_message_in_flight_delivered_or_unknown(queue: Queue) -> None:
    id = queue.send()
    claim = queue.claim_one()
    assert queue.call("cancel", id) is False

    queue.complete(claim)
    assert queue.call("cancel", id) is False
    assert queue.call("cancel", -1) is False
    assert queue.value("select ulak.cancel(null)") is False
    assert queue.status(id) == "completed"
    assert queue.events("message.cancelled") == []


def test_cancelling_twice_is_too_late_the_second_time(queue: Queue) -> None:
    id = queue.send()

    assert [queue.call("cancel", id), queue.call("cancel", id)] == [True, False]


def test_explain_history_and_the_log_tell_of_it(queue: Queue) -> None:
    id = queue.send()
    queue.call("cancel", id, now=queue.at(5))

    assert story(queue, id)[1:] == [
        "cancelled by postgres before its first attempt",
        f"next: nothing. To send it again: select ulak.replay_message({id});",
    ]
    assert [row["outcome"] for row in queue.rows("select outcome from ulak.history(%s)", id)] == ["cancelled"]
    (entry,) = queue.rows("select * from ulak.event_log where event = 'message.cancelled'")
    assert (entry["message_id"], entry["endpoint_name"], entry["detail"]["by"]) == (id, "shop", "postgres")


def test_a_metric_counts_what_was_cancelled(queue: Queue) -> None:
    before = cancelled_total(queue)
    ids = queue.send_many(3)

    for id in ids:
        queue.call("cancel", id)

    assert cancelled_total(queue) == before + 3


def test_a_cancelled_message_gives_way_to_the_next_of_its_ordering_key(queue: Queue) -> None:
    first, second, third = (queue.send(ordering_key="k") for _ in range(3))
    queue.claim(10)
    # The second and third are parked behind the first, which is given back.
    (claim,) = queue.rows("select id, attempts as attempt from ulak.queue where status = 'processing'")
    queue.call("release", claim["id"], "w", claim["attempt"], now=queue.at(0))

    queue.call("cancel", first, now=queue.at(1))
    queue.call("cancel", second, now=queue.at(1))

    assert [claim.id for claim in queue.claim(10, now=2)] == [third]


def test_the_key_of_a_cancelled_message_is_free(queue: Queue) -> None:
    first = queue.send(payload={"n": 1}, idempotency_key="k")

    assert queue.call("cancel_by_key", "shop", "k") is True

    second = queue.send(payload={"n": 2}, idempotency_key="k")
    assert second != first
    assert archived(queue, first)["status"] == "cancelled"


def test_by_key_it_is_too_late_as_by_id(queue: Queue) -> None:
    assert queue.call("cancel_by_key", "shop", "k") is False
    queue.send(idempotency_key="k")
    claim = queue.claim_one()
    assert queue.call("cancel_by_key", "shop", "k") is False
    queue.complete(claim)
    assert queue.call("cancel_by_key", "shop", "k") is False


def test_by_key_of_an_unknown_endpoint_or_without_a_key_is_an_error(queue: Queue) -> None:
    error = queue.refuses("cancel_by_key", "shpo", "k")
    assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "shop"?')
    with pytest.raises(psycopg.errors.NullValueNotAllowed), queue.db.transaction():
        queue.db.execute("select ulak.cancel_by_key('shop', null)")


def test_a_cancelled_message_is_replayed_only_if_asked_for(queue: Queue) -> None:
    id = queue.send()
    queue.call("cancel", id)
    endpoint = archived(queue, id)["endpoint_id"]

    everything = ("-infinity", "infinity")
    assert queue.call("replay_range", endpoint, *everything) == 0
    assert queue.call("replay_range", endpoint, *everything, status="cancelled") == 1
    assert queue.status(queue.call("replay_message", id)) == "pending"


def test_an_application_may_cancel_but_not_the_events_of_operators(connect: Connect, db: DB) -> None:
    admin = Queue(db)
    shop = admin.endpoint("shop")
    id = admin.send()
    # What tell_operators() makes.
    (alert,) = insert_messages(db, endpoint_id=shop, metadata={"event_type": "ulak.message.dead"})
    application = connect("ulak_application")

    assert application.execute("select ulak.cancel(%s)", [id]).fetchone() == (True,)
    for call in ("cancel(%s)", "reschedule(%s, now())", "reprioritise(%s, 1)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="event of ulak itself"):
            application.execute(f"select ulak.{call}", [alert])  # type: ignore[arg-type]
    assert admin.call("cancel", alert) is True


# Another time, another priority.


def test_a_rescheduled_message_is_claimed_at_its_new_time(queue: Queue) -> None:
    id = queue.send()

    assert queue.call("reschedule", id, queue.at(60)) is True

    assert queue.claim(10, now=59) == []
    assert queue.claim_one(now=60).id == id


def test_a_scheduled_message_is_brought_forward_but_jumps_no_queue(queue: Queue) -> None:
    first = queue.send()
    second = queue.send(scheduled_at=3600)

    queue.call("reschedule", second, queue.at(-7200))

    assert [claim.id for claim in queue.claim(10)] == [first, second]


def test_a_message_that_waits_for_a_retry_is_tried_at_the_new_time(queue: Queue) -> None:
    id = queue.send()
    queue.fail(queue.claim_one(), "no answer", retry_after=600)

    queue.call("reschedule", id, queue.at(30))

    assert queue.claim_one(now=30).attempt == 2


def test_nothing_is_rescheduled_beyond_its_expiry(queue: Queue) -> None:
    id = queue.send(expires_at=600)

    error = queue.refuses("reschedule", id, queue.at(600))
    assert (error.sqlstate, error.message_primary) == ("22023", "the message would expire before it is due")
    assert queue.call("reschedule", id, queue.at(599)) is True
    assert queue.refuses("reschedule", id, "infinity").sqlstate == "22023"


def test_it_is_too_late_to_change_what_is_in_flight_or_unknown(queue: Queue) -> None:
    id = queue.send()
    queue.claim_one()

    assert queue.call("reschedule", id, queue.at(60)) is False
    assert queue.call("reprioritise", id, 5) is False
    assert queue.call("reschedule", -1, queue.at(60)) is False
    assert queue.call("reprioritise", -1, 5) is False


def test_a_higher_priority_comes_first(queue: Queue) -> None:
    first, second = queue.send_many(2)

    assert queue.call("reprioritise", second, 7) is True

    assert [claim.id for claim in queue.claim(2)] == [second, first]
    assert queue.refuses("reprioritise", first, 11).sqlstate == "22023"


def test_the_order_of_a_key_stays_whatever_time_and_priority_its_messages_get(queue: Queue) -> None:
    first, second, third = (queue.send(ordering_key="k") for _ in range(3))
    queue.call("reschedule", first, queue.at(60))
    queue.call("reprioritise", third, 10)
    queue.call("reschedule", second, queue.at(-60))

    assert queue.claim(10, now=59) == []
    for now, id in ((60, first), (61, second), (62, third)):
        (claim,) = queue.claim(10, now=now)
        assert claim.id == id
        queue.complete(claim, now=now)


def test_explain_tells_of_the_change(queue: Queue) -> None:
    id = queue.send()
    queue.call("reprioritise", id, 4)
    queue.call("reschedule", id, queue.at(60))

    told = story(queue, id)
    assert "given priority 4 by postgres" in told
    assert any(line.startswith("rescheduled by postgres, not before ") for line in told)


# Operators: purge and discard.


def test_a_purge_cancels_what_waits_and_matches(queue: Queue) -> None:
    queue.endpoint("other")
    keep = queue.send(payload={"kind": "keep"})
    ids = [queue.send(payload={"kind": "drop"}, priority=2) for _ in range(3)]
    other = queue.send("other", {"kind": "drop"})

    (row,) = queue.rows(
        "select * from ulak.purge('shop', p_filter => '$ ? (@.kind == \"drop\")', p_priority => 2, p_limit => 2)"
    )

    assert (row["messages"], row["command"]) == (2, None)
    assert [archived(queue, id)["status"] for id in ids[:2]] == ["cancelled"] * 2
    assert [queue.status(id) for id in (keep, ids[2], other)] == ["pending"] * 3
    assert queue.events("message%") == ["message.cancelled", "message.cancelled", "messages.purged"]


def test_a_purge_by_nobody_in_particular_is_logged_with_its_count(queue: Queue) -> None:
    queue.send()

    queue.rows("select * from ulak.purge('shop', p_by => null)")

    assert queue.value("select detail from ulak.event_log where event = 'messages.purged'") == {"messages": 1}


def test_a_purge_by_time_is_by_when_it_was_sent(queue: Queue) -> None:
    id = queue.send()
    purged = "select messages from ulak.purge('shop', p_since => %s, p_until => %s)"

    assert queue.value(purged, queue.at(1), None) == 0
    assert queue.value(purged, None, queue.at(0)) == 0
    assert queue.value(purged, queue.at(0), queue.at(1)) == 1
    assert archived(queue, id)["status"] == "cancelled"


def test_a_dry_purge_counts_and_tells_the_command_that_does_it(queue: Queue) -> None:
    ids = queue.send_many(7)

    (row,) = queue.rows("select * from ulak.purge('shop', p_priority => 0, p_dry_run => true)")

    assert (row["messages"], [each["id"] for each in row["sample"]]) == (7, ids[:5])
    assert row["command"] == "select * from ulak.purge(p_endpoint => 'shop', p_priority => '0', p_by => 'postgres');"
    assert queue.value("select count(*) from ulak.queue") == 7
    assert queue.rows(row["command"])[0]["messages"] == 7
    assert queue.value("select count(*) from ulak.queue") == 0


def test_a_purge_needs_an_endpoint(queue: Queue) -> None:
    assert queue.refuses("purge", "nowhere").sqlstate == "42704"
    assert queue.refuses("purge", "shop", limit=0).sqlstate == "22023"
    with pytest.raises(psycopg.errors.UndefinedObject), queue.db.transaction():
        queue.db.execute("select ulak.purge(null)")


def test_discarded_letters_stay_marked_and_are_never_redriven(queue: Queue) -> None:
    first, second = (queue.bury(queue.send(payload={"n": n})) for n in (1, 2))

    (row,) = queue.rows("select * from ulak.discard('shop', p_filter => '$ ? (@.n == 1)', p_by => 'ann')")

    assert row["messages"] == 1
    (letter,) = queue.rows("select * from ulak.dlq where id = %s", first)
    assert (letter["status"], letter["discarded_by"], letter["discarded_at"] is not None) == ("discarded", "ann", True)
    assert queue.call("redrive_all") == 1
    error = queue.refuses("redrive_message", first)
    assert (error.sqlstate, error.message_primary) == ("55000", f"dead letter {first} was discarded")
    assert queue.value("select redriven_message_id is not null from ulak.dlq where id = %s", second)
    assert queue.rows("select failed, redriven, discarded from ulak.dlq_summary()") == [
        {"failed": 0, "redriven": 1, "discarded": 1}
    ]


@pytest.mark.parametrize("given", ["", "p_limit => 1", "p_by => 'ann'", "p_dry_run => true"])
def test_a_discard_that_does_not_say_which_letters_it_means_takes_none(queue: Queue, given: str) -> None:
    queue.bury(queue.send())

    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused, queue.db.transaction():
        queue.db.execute(f"select * from ulak.discard({given})")  # type: ignore[arg-type]
    error = refused.value.diag

    assert (error.sqlstate, queue.value("select status from ulak.dlq")) == ("22023", "failed")
    assert error.message_hint is not None and "p_since => '-infinity'" in error.message_hint
    assert queue.value("select messages from ulak.discard(p_since => '-infinity')") == 1


def test_what_was_discarded_comes_back_only_if_that_is_asked_for(queue: Queue) -> None:
    first, second = queue.send(), queue.send()
    for id in (first, second):
        queue.bury(id)
    queue.rows("select * from ulak.discard('shop')")
    span = "select ulak.replay_range('shop', '-infinity', 'infinity'{})"

    assert queue.value(span.format("")) == queue.value(span.format(", p_status => 'failed'")) == 0
    assert queue.call("redrive_all") == 0
    queue.call("replay_message", first)
    assert queue.value(span.format(", p_status => 'discarded'")) == 1

    assert queue.column("select status from ulak.dlq order by original_message_id") == ["redriven"] * 2
    assert queue.column("select made_from from ulak.queue order by 1") == [first, second]


def test_a_message_that_is_not_archived_yet_is_refused_by_a_replay_with_what_to_do(queue: Queue) -> None:
    waiting, in_flight = queue.send(priority=0), queue.send(priority=9)
    assert queue.claim_one().id == in_flight

    for id, status in ((waiting, "pending"), (in_flight, "processing")):
        error = queue.refuses("replay_message", id)
        assert (error.sqlstate, error.message_detail) == ("P0002", f"It is in the queue, {status}.")
        assert error.message_hint


def test_explain_and_the_log_tell_who_discarded_a_letter(queue: Queue) -> None:
    id = queue.send()
    queue.bury(id)
    queue.rows("select * from ulak.discard('shop', p_by => 'ann')")

    assert story(queue, id)[-2:] == ["discarded by ann", "next: nothing, its dead letter was discarded"]
    assert queue.events("message.discarded") == ["message.discarded"]


def test_a_dry_discard_tells_the_command_that_does_it(queue: Queue) -> None:
    queue.bury(queue.send(), "refused")

    (row,) = queue.rows("select * from ulak.discard('shop', p_error_like => '%%refused%%', p_dry_run => true)")

    assert (row["messages"], len(row["sample"])) == (1, 1)
    (done,) = queue.rows(row["command"].replace("%", "%%"))
    assert (done["messages"], done["command"]) == (1, None)


def test_letters_of_a_dropped_endpoint_can_be_discarded(queue: Queue) -> None:
    queue.bury(queue.send())
    queue.db.execute("delete from ulak.endpoints")

    assert queue.value("select messages from ulak.discard('shop')") == 1
    assert queue.refuses("discard", "shpo").sqlstate == "42704"


def test_dropping_an_endpoint_names_what_helps_and_that_helps(queue: Queue) -> None:
    queue.bury(queue.send())
    queue.send()

    hint = queue.refuses("drop_endpoint", "shop").message_hint
    assert hint is not None and "select * from ulak.purge('shop', p_dry_run => true);" in hint
    queue.rows("select * from ulak.purge('shop')")

    hint = queue.refuses("drop_endpoint", "shop").message_hint
    assert hint is not None and "select * from ulak.discard('shop');" in hint
    queue.rows("select * from ulak.discard('shop')")

    assert queue.call("drop_endpoint", "shop") is True
