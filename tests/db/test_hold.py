"""A dead message may hold its ordering key: what follows waits until its letter is redriven or discarded."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Queue


@pytest.fixture
def shop(queue: Queue) -> Queue:
    """An endpoint that holds keys and gives up at once."""
    queue.endpoint("shop", {"on_dead": "hold"}, {"max_retries": 0})
    return queue


def die(queue: Queue, now: float = 0) -> int:
    """The first message of key k dies; its dead letter."""
    claim = queue.claim_one(now=now)
    queue.fail(claim, "HTTP 400", permanent=True, now=now)
    return int(queue.value("select max(id) from ulak.dlq where original_message_id = %s", claim.id))


def claimed(queue: Queue, now: float = 0) -> list[int]:
    return [claim.id for claim in queue.claim(10, now=now)]


def line(queue: Queue, id: int) -> str:
    """The last line of explain()."""
    return str(queue.column("select what from ulak.explain(%s, %s)", id, queue.at(1))[-1])


def held(queue: Queue) -> Any:
    return queue.value(
        "select metric_value from ulak.metrics(%s) where metric_name = 'ordering_keys_held' and labels @> '{\"endpoint\": \"shop\"}'",
        queue.at(1),
    )


def test_without_it_the_next_message_goes_on(queue: Queue) -> None:
    queue.endpoint("shop", policy={"max_retries": 0})
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")

    die(queue)

    assert claimed(queue) == [second]


def test_what_follows_a_dead_message_waits_and_other_keys_go_on(shop: Queue) -> None:
    first, second = shop.send(ordering_key="k"), shop.send(ordering_key="k")
    die(shop)
    third, other, free = shop.send(ordering_key="k"), shop.send(ordering_key="other"), shop.send()

    assert claimed(shop, now=1) == [other, free]
    shop.call("recover_stale_messages", now=shop.at(1))
    shop.value("select ulak_private.unpark_orphans(%s)", shop.at(2))
    assert claimed(shop, now=3) == []
    assert [shop.status(id) for id in (first, second, third)] == ["held", "pending", "pending"]


def test_a_redrive_brings_the_message_back_as_the_first(shop: Queue) -> None:
    first, second = shop.send(ordering_key="k"), shop.send(ordering_key="k")
    letter = die(shop)
    assert claimed(shop, now=1) == []

    assert shop.call("redrive_message", letter, now=shop.at(2)) == first

    claim = shop.claim_one(now=3)
    assert (claim.id, claim.attempt) == (first, 2)
    assert claimed(shop, now=3) == []
    shop.complete(claim, now=4)
    assert claimed(shop, now=5) == [second]
    message = shop.message(first)
    assert (message["status"], len(message["failure_history"])) == ("completed", 1)


def test_a_redriven_message_has_a_fresh_budget_and_may_die_again(shop: Queue) -> None:
    first, second = shop.send(ordering_key="k", max_retries=1), shop.send(ordering_key="k")
    shop.fail(shop.claim_one(), now=0)
    shop.fail(shop.claim_one(now=100), now=100)
    letter = shop.dead(first)["id"]
    shop.call("redrive_message", letter, now=shop.at(101))
    shop.fail(shop.claim_one(now=102), now=102)
    assert shop.status(first) == "pending"
    shop.fail(shop.claim_one(now=300), "again", now=300)

    letters = shop.rows(
        "select status, is_holding, attempts from ulak.dlq where original_message_id = %s order by id", first
    )

    assert [tuple(row.values()) for row in letters] == [("redriven", False, 2), ("failed", True, 4)]
    assert claimed(shop, now=301) == []
    assert shop.status(second) == "pending"
    assert shop.events("message.dead") == ["message.dead"] * 2


def test_a_discarded_letter_lets_the_next_message_go(shop: Queue) -> None:
    first, second = shop.send(ordering_key="k"), shop.send(ordering_key="k")
    letter = die(shop)
    assert claimed(shop, now=1) == []

    shop.value("select messages from ulak.discard(p_ids => %s, p_now => %s)", [letter], shop.at(2))

    assert claimed(shop, now=3) == [second]
    assert shop.status(first) == "failed"
    assert shop.value("select count(*) from ulak.queue where id = %s", first) == 0


def test_letters_in_the_middle_hold_what_follows_them(shop: Queue) -> None:
    first, second, third = (shop.send(ordering_key="k") for _ in range(3))
    letter = shop.bury(second)
    shop.complete(shop.claim_one())
    assert claimed(shop, now=1) == []

    shop.call("redrive_message", letter, now=shop.at(2))

    assert claimed(shop, now=3) == [second]
    assert (shop.status(first), shop.status(third)) == ("completed", "pending")


def test_all_letters_of_a_key_are_redriven_in_their_order(shop: Queue) -> None:
    ids = [shop.send(ordering_key="k") for _ in range(3)]
    shop.bury(ids[0])
    shop.bury(ids[1])

    assert shop.call("redrive_endpoint", "shop") == 2

    order = []
    while claims := shop.claim(10, now=1):
        order += [claim.id for claim in claims]
        for claim in claims:
            shop.complete(claim, now=1)
    assert order == ids


def test_a_redrive_at_a_rate_keeps_the_place_of_what_holds_its_key(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    shop.send(ordering_key="k")
    letter = die(shop)

    shop.value("select messages from ulak.redrive(p_ids => %s, p_rate => 1, p_now => %s)", [letter], shop.at(2))

    assert claimed(shop, now=2) == [first]


def test_a_message_that_does_not_fit_holds_its_key(queue: Queue) -> None:
    queue.endpoint("shop", {"on_dead": "hold", "max_pending": 1, "when_full": "dead_letter"})
    first, second = queue.send(ordering_key="k"), queue.send(ordering_key="k")
    queue.complete(queue.claim_one())
    third = queue.send(ordering_key="k")

    assert [queue.status(id) for id in (first, second, third)] == ["completed", "held", "pending"]
    assert claimed(queue, now=1) == []


def test_a_message_whose_worker_went_silent_holds_its_key(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    shop.send(ordering_key="k")
    shop.claim_one(lease=10)
    shop.recover(now=11)

    assert shop.status(first) == "held"
    assert claimed(shop, now=12) == []


def test_nothing_but_a_decision_ends_it(shop: Queue) -> None:
    first = shop.send(ordering_key="k", expires_at=60, idempotency_key="i")
    second = shop.send(ordering_key="k")
    die(shop)
    shop.expire(now=61)
    shop.call("purge", "shop")

    assert shop.status(first) == "held"
    assert shop.status(second) == "cancelled"
    assert shop.call("cancel", first) is False
    error = shop.refuses("archive_single_to_dlq", first)
    assert (error.sqlstate, error.message_detail) == ("55000", "Its status is held.")
    assert shop.refuses("drop_endpoint", "shop").sqlstate == "55006"


def test_retention_keeps_a_letter_that_holds_its_key(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    other = shop.send()
    for claim in shop.claim(2):
        shop.fail(claim, permanent=True)

    shop.call("cleanup_dlq", 1, now=shop.at(3 * 86400))

    assert shop.column("select original_message_id from ulak.dlq") == [first]
    shop.value("select messages from ulak.discard('shop')")
    shop.call("cleanup_dlq", 1, now=shop.at(3 * 86400))
    assert shop.column("select original_message_id from ulak.dlq") == []
    assert shop.status(other) == "failed"


def test_a_held_message_is_no_backlog_and_takes_no_slot(queue: Queue) -> None:
    queue.endpoint("shop", {"on_dead": "hold", "max_in_flight": 1, "max_pending": 2}, {"max_retries": 0})
    queue.send(ordering_key="k")
    die(queue)
    other = queue.send()
    queue.send()

    assert claimed(queue, now=1) == [other]


def test_explain_says_which_message_holds_the_key(shop: Queue) -> None:
    first, second = shop.send(ordering_key="k"), shop.send(ordering_key="k")
    letter = die(shop)

    assert line(shop, first) == (
        f'next: nothing, it is dead letter {letter} and holds ordering key "k": 1 message waits behind it. To try again: '
        f"select ulak.redrive_message({letter}); to give it up: select * from ulak.discard(p_ids => '{{{letter}}}');"
    )
    assert line(shop, second) == (
        f'next: it waits for its ordering key "k" behind message {first}, which is a dead letter that holds the key until it '
        f"is redriven or discarded: select * from ulak.explain({first});"
    )


def test_explain_tells_that_it_was_redriven_in_its_place(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    letter = die(shop)
    shop.call("redrive_message", letter, "bob", now=shop.at(2))

    story = shop.column("select what from ulak.explain(%s, %s)", first, shop.at(3))

    assert any(what.startswith("sent by postgres") for what in story)
    assert "redriven by bob" in story
    assert shop.column("select message from ulak.history(%s, %s)", first, shop.at(3)) == [first]


def test_explain_tells_a_redrive_in_place_between_the_attempts_before_and_after_it(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    letter = die(shop, now=1)
    shop.call("redrive_message", letter, "bob", now=shop.at(2))
    die(shop, now=3)

    story = shop.column("select what from ulak.explain(%s, %s)", first, shop.at(4))

    told = [what.partition(" by ")[0].partition(":")[0] for what in story]
    assert told == [
        "sent",
        "attempt 1 failed after 0.0ms",
        "an earlier cycle ended after 1 attempt",
        "redriven",
        "attempt 2 failed after 0.0ms",
        "given up after 2 attempts",
        "next",
    ]


def test_the_doctor_names_a_letter_that_others_wait_for(shop: Queue) -> None:
    query = "select severity, finding, fix from ulak.doctor(%s) where \"check\" = 'ordering'"
    shop.send(ordering_key="k")
    letter = die(shop)
    assert shop.rows(query, shop.at(3600)) == []

    shop.send(ordering_key="k")

    (finding,) = shop.rows(query, shop.at(3600))
    assert finding["severity"] == "warning"
    assert finding["finding"] == (
        f'dead letter {letter} of endpoint "shop" has held ordering key "k" for 1h 0m, and 1 message waits behind it'
    )
    assert f"select ulak.redrive_message({letter});" in finding["fix"]


def test_a_metric_counts_held_keys(shop: Queue) -> None:
    shop.send(ordering_key="k")
    assert held(shop) == 0

    letter = die(shop)
    assert held(shop) == 1

    shop.call("redrive_message", letter, now=shop.at(1))
    assert held(shop) == 0


def test_a_config_with_another_value_is_refused(queue: Queue) -> None:
    error = queue.refuses("create_endpoint", "shop", "pull", {"on_dead": "stop"})

    assert (error.sqlstate, "$.on_dead" in str(error.message_primary)) == ("22023", True)


def test_a_message_that_held_its_key_and_was_delivered_can_be_replayed(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    shop.call("redrive_message", die(shop), now=shop.at(1))
    shop.complete(shop.claim_one(now=2), now=3)

    planned = shop.value("select messages from ulak.replay_plan('shop', '-infinity', 'infinity')")
    replayed = shop.call("replay_message", first, now=shop.at(4))

    assert planned == 1
    assert [claim.id for claim in shop.claim(10, now=5)] == [replayed]


def test_a_message_that_held_its_key_twice_can_be_replayed_once_it_is_given_up(shop: Queue) -> None:
    first = shop.send(ordering_key="k")
    shop.call("redrive_message", die(shop), now=shop.at(1))
    letter = die(shop, now=2)
    shop.value("select messages from ulak.discard(p_ids => %s)", [letter])

    replayed = shop.call("replay_message", first, now=shop.at(4))

    assert shop.refuses("replay_message", first).message_primary == f"dead letter {letter} was already redriven"
    assert [claim.id for claim in shop.claim(10, now=5)] == [replayed]


def test_a_range_has_messages_that_held_their_key_before_they_died_for_good(shop: Queue) -> None:
    shop.send(ordering_key="k")
    shop.call("redrive_message", die(shop), now=shop.at(1))
    shop.call("alter_endpoint", "shop", {"on_dead": "continue"})
    die(shop, now=2)

    replayed = shop.value(
        "select ulak.replay_range(id, '-infinity', 'infinity') from ulak.endpoints where name = 'shop'"
    )

    assert replayed == 1
