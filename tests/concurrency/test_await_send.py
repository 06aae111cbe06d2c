"""Where a worker without work waits: until a message is sent, or for its time."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.sessions import Running, wait_until

LAST = "select coalesce(pg_sequence_last_value('ulak.queue_id_seq'), 0)"
WAITING = "select wait_event = 'PgSleep' from pg_stat_activity where pid = %s"


def await_send(worker: psycopg.Connection[Any], last: int, seconds: float) -> int:
    row = worker.execute("select ulak_private.await_send(%s, 0.01, %s)", [last, seconds]).fetchone()
    assert row is not None
    return int(row[0])


def test_a_send_ends_the_wait(queue: Queue, connect: Connect) -> None:
    queue.endpoint()
    worker = connect(role="ulak_worker")
    last = queue.value(LAST)

    waiting = Running(lambda: await_send(worker, last, 15))
    wait_until(lambda: queue.value(WAITING, worker.info.backend_pid))
    id = queue.send()

    assert waiting.result() == id > last


def test_a_send_that_is_not_yet_committed_ends_it_too(queue: Queue, connect: Connect) -> None:
    queue.endpoint()
    worker, sender = connect(role="ulak_worker"), connect(autocommit=False)
    last = queue.value(LAST)

    waiting = Running(lambda: await_send(worker, last, 15))
    wait_until(lambda: queue.value(WAITING, worker.info.backend_pid))
    sender.execute("select ulak.send('shop', '{}')")

    assert waiting.result() > last
    sender.rollback()


def test_without_a_send_it_ends_after_its_time(queue: Queue, connect: Connect) -> None:
    last = queue.value(LAST)

    assert await_send(connect(role="ulak_worker"), last, 0.05) == last


def test_a_cancel_ends_the_wait(queue: Queue, connect: Connect) -> None:
    worker = connect(role="ulak_worker")
    last = queue.value(LAST)

    waiting = Running(lambda: await_send(worker, last, 15))
    wait_until(lambda: queue.value(WAITING, worker.info.backend_pid))
    queue.db.execute("select pg_cancel_backend(%s)", [worker.info.backend_pid])

    with pytest.raises(psycopg.errors.QueryCanceled):
        waiting.result()
