"""The server's clock was an hour ahead and is set back: nothing waits for that hour."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Queue

HOUR = 3600.0

POLICY = {"max_retries": 5, "backoff": "fixed", "base_delay_seconds": 10}


def date_ahead(queue: Queue, id: int, seconds: float = HOUR) -> None:
    """As if it had been sent by a clock that was ahead."""
    queue.db.execute(
        """
        update ulak.queue set created_at = created_at + a, updated_at = updated_at + a, next_retry_at = next_retry_at + a
        from make_interval(secs => %s) a where id = %s
        """,
        [seconds, id],
    )


def sweep(queue: Queue, now: float, most: int = 10000) -> tuple[int, bool]:
    (row,) = queue.rows("select * from ulak_private.bring_back(%s, %s)", queue.at(now), most)
    return row["messages"], row["more"]


def told(queue: Queue, now: float) -> list[str]:
    return queue.column("""select finding from ulak.doctor(%s) where "check" = 'clock'""", queue.at(now))


# Limits and the circuit breaker.


@pytest.mark.parametrize("rate", [{"limit": 1, "interval": "second"}, {"limit": 1, "interval": "hour"}])
def test_a_rate_limited_endpoint_goes_on(queue: Queue, rate: dict[str, Any]) -> None:
    queue.endpoint(config={"rate_limit": rate})
    queue.send_many(5)
    assert [len(queue.claim(5, now=HOUR)) for _ in range(2)] == [1, 0]

    assert [len(queue.claim(5, now=0)) for _ in range(2)] == [1, 0]

    assert len(queue.claim(5, now=0.5)) == 0
    assert len(queue.claim(5, now=1.1 if rate["interval"] == "second" else HOUR + 0.1)) == 1


def test_sessions_that_read_the_clock_a_moment_apart_gain_no_tokens(queue: Queue) -> None:
    queue.endpoint(config={"rate_limit": {"limit": 1, "interval": "second"}})
    queue.send_many(5)
    assert len(queue.claim(5, now=0.9)) == 1

    assert len(queue.claim(5, now=0)) == 0


def test_a_slow_release_ends_with_the_backlog_that_was_held(queue: Queue) -> None:
    queue.endpoint()
    queue.call("disable_endpoint", "shop", now=queue.at(0))
    queue.send_many(2)
    queue.call("enable_endpoint", "shop", 1, now=queue.at(HOUR))

    assert [len(queue.claim(5, now=now)) for now in (2, 4)] == [1, 1]

    assert queue.circuit()["release_rate"] is None


def test_an_open_circuit_is_probed(queue: Queue) -> None:
    queue.endpoint(config={"circuit_breaker": {"threshold": 1, "cooldown": 30}}, policy=POLICY)
    first = queue.send()
    queue.fail(queue.claim_one(now=HOUR), now=HOUR)
    second = queue.send()
    assert (first, queue.state(), queue.claim(now=HOUR + 1)) == (first, "open", [])
    assert "is due for a probe" in queue.column("select what from ulak.explain(%s, %s)", second, queue.at(0))[-1]

    assert queue.claim_one(now=0).id == second

    assert queue.state() == "half_open"


def test_a_window_of_the_circuit_breaker_that_began_ahead_begins_anew(queue: Queue) -> None:
    rules = {"mode": "rate", "window": 60, "min_requests": 2, "failure_rate": 0.5}
    queue.endpoint(config={"circuit_breaker": rules}, policy=POLICY)
    queue.send_many(2)
    queue.fail(queue.claim_one(now=HOUR), now=HOUR)

    queue.fail(queue.claim_one(now=0), now=0)

    circuit = queue.circuit()
    assert (circuit["circuit_window_requests"], circuit["circuit_window_started_at"]) == (1, queue.at(0))


def test_a_success_that_is_dated_ahead_is_overwritten_and_hides_no_failure(queue: Queue) -> None:
    queue.endpoint(policy=POLICY)
    queue.send_many(2)
    queue.complete(queue.claim_one(now=HOUR), now=HOUR)
    assert queue.circuit()["last_success_at"] == queue.at(HOUR)

    queue.complete(queue.claim_one(now=0), now=0)

    assert queue.circuit()["last_success_at"] == queue.at(0)


def test_a_queue_that_was_full_takes_messages(queue: Queue) -> None:
    queue.endpoint()
    queue.call("configure", "max_queue_size", "100")
    full_until = "select setval('ulak_private.queue_headroom', -(extract(epoch from clock_timestamp() + %s::interval) * 1000)::bigint)"

    queue.value(full_until, "9 s")
    assert queue.refuses("send", "shop", "1").sqlstate == "53400"
    queue.value(full_until, "1 hour")
    queue.send()


# Messages.


def test_a_message_that_was_sent_ahead_is_due_at_once(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    date_ahead(queue, id)
    assert queue.claim(now=0) == []

    assert sweep(queue, 0) == (1, False)

    assert queue.claim_one(now=0).id == id
    assert queue.message(id)["created_at"] == queue.at(0)
    assert queue.events("clock%") == ["clock.set_back"]


def test_a_retry_waits_as_long_as_it_was_to_wait(queue: Queue) -> None:
    queue.endpoint(policy=POLICY)
    id = queue.send()
    queue.fail(queue.claim_one(now=HOUR), now=HOUR)
    sweep(queue, HOUR + 1)

    assert sweep(queue, 0) == (1, False)

    assert queue.due_in(id) == 10
    assert sweep(queue, 1) == (0, False)
    assert queue.due_in(id) == 10


def test_a_scheduled_message_keeps_the_time_that_was_asked_for(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send(scheduled_at=600)
    later = queue.send(scheduled_at=2 * HOUR)
    for each in (id, later):
        queue.db.execute(
            "update ulak.queue set created_at = %s, updated_at = %s where id = %s", [queue.at(HOUR)] * 2 + [each]
        )

    assert sweep(queue, 0) == (2, False)

    assert (queue.due_in(id), queue.due_in(later)) == (600, 2 * HOUR)


def test_a_lease_lasts_as_long_as_it_was_to_last(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(2)
    claimed = queue.claim_one(lease=60, now=HOUR)
    renewed = queue.claim_one(lease=60, now=0)
    queue.heartbeat(renewed, lease=60, now=59)
    assert queue.recover(now=HOUR - 1) == 1
    sweep(queue, HOUR)

    sweep(queue, 0)

    assert queue.message(claimed.id)["lease_until"] == queue.at(60)
    assert queue.recover(now=59) == 0
    assert queue.recover(now=60) == 1


def test_a_lease_that_was_renewed_ahead_lasts_as_long_as_it_was_to_last(queue: Queue) -> None:
    queue.endpoint()
    queue.send()
    claim = queue.claim_one(lease=2 * HOUR, now=0)
    assert queue.heartbeat(claim, lease=60, now=HOUR)
    sweep(queue, HOUR)

    sweep(queue, 0)

    assert queue.message(claim.id)["lease_until"] == queue.at(60)


def test_a_message_that_is_parked_stays_parked(queue: Queue) -> None:
    queue.endpoint()
    first, second = queue.send(ordering_key="k"), queue.send(ordering_key="k")
    assert [claim.id for claim in queue.claim(10, now=HOUR)] == [first]
    sweep(queue, HOUR)

    assert sweep(queue, 0) == (2, False)

    assert queue.value("select next_retry_at = 'infinity' from ulak.queue where id = %s", second)


def test_a_message_that_is_brought_back_keeps_its_body(queue: Queue) -> None:
    """By which time its event is found."""
    endpoint = queue.endpoint()
    ahead = queue.at(HOUR)
    queue.db.execute("insert into ulak_private.events (id, created_at, payload) values (-1, %s, '1')", [ahead])
    queue.db.execute(
        """
        insert into ulak_private.deliveries (id, event_id, endpoint_id, created_at, updated_at, next_retry_at)
        values (-1, -1, %s, %s, %s, %s)
        """,
        [endpoint, ahead, ahead, ahead],
    )
    sweep(queue, HOUR)

    assert sweep(queue, 0) == (1, False)

    assert queue.claim_one(now=1).payload == 1


# What the look costs, and until when it goes on.


def test_a_look_goes_on_where_the_last_one_ended_and_begins_with_the_newest(queue: Queue) -> None:
    queue.endpoint()
    ids = queue.send_many(5)
    for id in ids:
        date_ahead(queue, id)
    due = "select id from ulak.queue where next_retry_at <= %s order by id"

    assert sweep(queue, 0, most=2) == (2, True)
    assert queue.column(due, queue.at(0)) == ids[3:]
    assert sweep(queue, 0, most=2) == (2, True)
    assert sweep(queue, 0, most=2) == (1, False)

    assert queue.column(due, queue.at(0)) == ids


def test_a_transaction_that_began_ahead_and_commits_later_is_found(queue: Queue) -> None:
    queue.endpoint()
    date_ahead(queue, queue.send())
    sweep(queue, 0)
    late = queue.send()
    date_ahead(queue, late)

    assert sweep(queue, 600) == (1, False)

    assert queue.due_in(late) == 600


def test_there_is_no_look_while_the_clock_is_right_or_after_an_hour(queue: Queue) -> None:
    queue.endpoint()
    old = queue.send()
    date_ahead(queue, old, 100 * HOUR)
    queue.send_many(10)

    assert sweep(queue, 0) == (0, False)
    assert queue.due_in(old) == 100 * HOUR
    queue.db.execute("update ulak_private.sweep_state set latest_at = %s", [queue.at(100 * HOUR)])
    assert sweep(queue, 1) == (1, False)
    date_ahead(queue, old, 100 * HOUR)
    assert sweep(queue, HOUR + 2) == (0, False)
    assert queue.value("select latest_at from ulak_private.sweep_state") == queue.at(HOUR + 2)


def test_maintenance_brings_back_what_is_dated_ahead(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    date_ahead(queue, id)

    queue.value("select ulak_private.maintenance_step('clock', now(), '-infinity', now())")

    assert queue.claim_one(now=0).id == id


def test_the_doctor_names_a_clock_that_was_set_back(queue: Queue) -> None:
    queue.endpoint()
    sweep(queue, HOUR)
    assert told(queue, HOUR) == []

    (at_once,) = told(queue, 60)
    sweep(queue, 60)
    (later,) = told(queue, 120)

    assert "the server's clock was set back by 59m 0s: messages" in at_once
    assert "the server's clock was set back by 59m 0s, 1m 0s ago: messages" in later
    sweep(queue, HOUR + 61)
    assert told(queue, HOUR + 61) == []


def test_a_sign_of_life_from_the_future_does_not_count(queue: Queue) -> None:
    queue.db.execute(
        """
        insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version)
        values (1, 'worker 1', 1, 'stopped', now(), now(), now() + interval '1 hour', '0')
        """
    )

    assert queue.value("select ulak_private.count_alive(now())") == 0
    assert len(told(queue, 0)) == 1
