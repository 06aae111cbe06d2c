"""What was sent is stored once, in its event, and every message has one."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from support.messages import insert_messages
from support.queue import Queue

TABLES = ("deliveries", "archived", "letters")
BODY = {"payload": {"n": 1}, "headers": {"x-a": "b"}, "metadata": {"m": 2}, "sent_by": "bank", "max_retries": 3}


@pytest.mark.parametrize("table", TABLES)
def test_a_message_has_an_event_and_no_body_of_its_own(queue: Queue, table: str) -> None:
    columns = dict(
        queue.db.execute(
            "select attname, attnotnull from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped",
            [f"ulak_private.{table}"],
        ).fetchall()
    )

    assert columns["event_id"] is True
    assert columns.keys() & BODY.keys() == set()


def test_an_event_knows_its_sender(queue: Queue) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation), queue.db.transaction():
        queue.db.execute("insert into ulak_private.events (id, payload, sent_by) values (1, '{}', null)")


def test_each_view_shows_what_the_event_says(queue: Queue) -> None:
    endpoint = queue.endpoint()
    sent_at = queue.base - timedelta(days=40)
    (id,) = insert_messages(queue.db, created_at=sent_at, endpoint_id=endpoint, **BODY)
    shown = f"select {', '.join(BODY)} from ulak."

    assert queue.rows(f"{shown}queue where id = %s", id) == queue.rows(f"{shown}messages where id = %s", id) == [BODY]

    letter = queue.bury(id)
    assert queue.rows(f"{shown}archive where id = %s", id) == [BODY]
    assert queue.rows(f"{shown}dlq where id = %s", letter) == [BODY]
    # The event is found by the time when it was sent, not by that of the new message.
    again = queue.call("redrive_message", letter)
    assert queue.value("select created_at from ulak.queue where id = %s", again) > sent_at
    assert queue.rows(f"{shown}queue where id = %s", again) == [BODY]
