"""A setting that was committed before a message was sent applies to that message: no worker claims it with older settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.queue import Queue, Sessions
from support.sessions import gather, wait_until


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.db.execute("delete from ulak.setting_values")
    queue.endpoint("shop", {"url": "https://example.com"}, protocol="http")
    return queue


def options(session: Queue) -> dict[str, Any]:
    (row,) = session.rows("select settings::text, fingerprint from ulak_private.worker_options()")
    return json.loads(row["settings"]) | {"fingerprint": row["fingerprint"]}


def claimed(session: Queue) -> list[int]:
    """The n of each."""
    return session.column(
        "select (payload ->> 'n')::integer from ulak_private.claim('w', 10, p_protocols => '{http}') where id > 0"
    )


def claimed_in_light_traffic(session: Queue, after: int) -> list[int]:
    claim = """
        select (payload ->> 'n')::integer
        from ulak_private.claim_new('w', %s, null, 10, interval '30 s', null, row('{}'::bigint[], '{}'::integer[], 10)::ulak_private.rooms)
    """
    return session.column(claim, after)


@pytest.mark.parametrize("is_light", [False, True])
def test_a_worker_claims_nothing_until_it_has_the_current_settings(
    queue: Queue, sessions: Sessions, is_light: bool
) -> None:
    (worker,) = sessions(1)
    known = options(worker)
    queue.call("configure", "http_timeout", "7")
    id = queue.send(payload={"n": 1})

    def claim() -> list[int]:
        return claimed_in_light_traffic(worker, id - 1) if is_light else claimed(worker)

    assert claim() == []
    assert worker.value("select settings from ulak_private.worker_check(1, 'any')") != known["fingerprint"]
    assert options(worker)["http_timeout"] == "7"
    assert claim() == [1]


def test_a_worker_goes_on_when_a_setting_is_as_it_was(queue: Queue, sessions: Sessions) -> None:
    (worker,) = sessions(1)
    known = options(worker)
    queue.call("configure", "http_timeout", "7")
    queue.db.execute("select ulak.configure('http_timeout', null)")
    queue.send(payload={"n": 1})

    assert worker.value("select settings from ulak_private.worker_check(1, 'any')") == known["fingerprint"]
    assert claimed(worker) == [1]


def test_a_session_that_is_no_workers_claims_whatever_the_settings_are(queue: Queue, sessions: Sessions) -> None:
    (consumer,) = sessions(1)
    queue.endpoint("pulled")
    queue.call("configure", "http_timeout", "7")
    id = queue.send("pulled")

    assert [claim.id for claim in consumer.claim(10)] == [id]


def test_settings_that_were_rolled_back_are_asked_for_again(queue: Queue, sessions: Sessions) -> None:
    (worker,) = sessions(1)
    worker.db.execute("begin")
    known = options(worker)
    worker.db.execute("rollback")

    assert worker.value("select settings from ulak_private.worker_check(1, 'any')") != known["fingerprint"]


def test_messages_never_overtake_the_settings_they_were_sent_after(queue: Queue, sessions: Sessions) -> None:
    """The n of a message is the http_timeout that was committed with it: no claim returns one that is above what the
    worker knows."""
    worker, sender = sessions(2)
    found: list[tuple[int, int]] = []

    def send() -> None:
        # The default is 10.
        for n in range(11, 211):
            with sender.db.transaction():
                sender.call("configure", "http_timeout", str(n))
                sender.send(payload={"n": n})

    def claim() -> bool:
        known = int(options(worker)["http_timeout"])
        for _ in range(3):
            found.extend((n, known) for n in claimed(worker))
        return len(found) >= 200

    gather([send, lambda: wait_until(claim, "200 messages") and None])

    assert [(n, known) for n, known in found if n > known] == []
