"""A database of an earlier release in use: what its upgrade has to carry over. Frozen, like the releases."""

from __future__ import annotations

from typing import Any

import psycopg

FIRST = "0.1.0"
LAST = "0.2.0"
RELEASES = (FIRST, LAST)

DB = psycopg.Connection[Any]

# For tests of what came after it, when they are run against it: its pull workers were members of ulak_worker, and nothing was
# granted to them one by one.
STAND_INS = """
    create function ulak.grant_endpoint(p_name text, p_role text) returns boolean language sql as 'select true';
    create function ulak.revoke_endpoint(p_name text, p_role text) returns boolean language sql as 'select true';
    create table ulak.ordering_keys ();
    create table ulak.locks ();
"""

STATEMENTS = [
    "select ulak.configure('batch_size', '123')",
    "select ulak.set_secret('token', 'not to be seen')",
    "select ulak.create_endpoint('shop', 'pull', '{}', '{\"max_retries\": 3}')",
    "select ulak.create_endpoint('strict', 'pull', '{}', '{\"max_retries\": 0}')",
    """
    select ulak.create_endpoint(
        'web',
        'http',
        '{
            "url": "https://example.com/hook",
            "auth": {"type": "bearer", "token": {"$secret": "token"}},
            "signing_secret": "a secret of its own"
        }'
    )
    """,
    "select ulak.rotate_secret('web', '1 hour')",
    "select ulak.create_endpoint('disabled', 'pull', '{}')",
    "select ulak.disable_endpoint('disabled')",
    "select ulak.create_event_type('order.placed', 'an order', '{\"type\": \"object\"}')",
    "select ulak.subscribe('order.placed', 'web', '{\"a\": 1}')",
    "select ulak.subscribe('ulak.message.dead', 'web')",
    "select ulak.publish('order.placed', '{\"a\": 1}')",
    # Delivered and archived; delivered; dead and redriven; dead; expired.
    "select ulak.send('shop', jsonb_build_object('n', n)) from generate_series(1, 4) n",
    "select ulak.complete(c.id, 'w', c.attempt, '{\"status\": 200}') from ulak.claim('w', 2, 'shop') c",
    "select ulak.archive_completed_messages(0, 1, now() + '1 s')",
    "select ulak.fail(c.id, 'w', c.attempt, 'no', p_permanent => true) from ulak.claim('w', 2, 'shop') c",
    "select ulak.redrive_message(min(id)) from ulak.dlq",
    "select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w', 1, 'shop') c",
    "select ulak.send('shop', '{\"expires\": true}', p_expires_at => now() + '1 s')",
    "select ulak.mark_expired_messages(now() + '1 min')",
    # Waiting: plain, with everything that send() takes, for later, after a failure; held.
    "select ulak.send('shop', '{\"plain\": true}')",
    """
    select ulak.send(
        'shop',
        '{"full": true}',
        p_priority => 7,
        p_idempotency_key => 'once',
        p_correlation_id => 'c0ffee00-0000-4000-8000-000000000000',
        p_expires_at => now() + '30 days',
        p_headers => '{"x-a": "b"}',
        p_metadata => '{"c": "d"}'
    )
    """,
    "select ulak.send('shop', '{\"later\": true}', p_scheduled_at => now() + '1 h')",
    "select ulak.send('disabled', '{\"held\": true}')",
    "select ulak.send('web', '{\"web\": true}')",
    "insert into ulak.archive (id, endpoint_id, status, payload, created_at) values (-1, 1, 'completed', '{}', '1999-01-01')",
    "select ulak.mark_handled('consumer', 'key')",
    "insert into ulak.endpoint_stats (endpoint_id, minute, delivered) values (1, date_trunc('minute', now()), 1)",
    "insert into ulak.endpoint_totals (endpoint_id, delivered) values (1, 1)",
    "insert into ulak.backlog_samples (endpoint_id, sampled_at, waiting, dead) values (1, now(), 1, 0)",
    "insert into ulak.traffic (minute) values (date_trunc('minute', now()))",
    """
    insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version)
    values (1, 'worker 1', 1, 'stopped', now(), now(), now(), '0.1.0')
    """,
    "insert into ulak.schedule (workers) values (2)",
    """
    insert into ulak.maintenance_runs (step, started_at, duration, rows, finished, runs, errors, total_rows)
    values ('archive', now(), '1 s', 1, true, 1, 0, 1)
    """,
]

# What 0.1.0 didn't have.
LATER_STATEMENTS = [
    "select ulak.grant_endpoint('shop', 'test_ulak_consumer')",
    """
    insert into ulak.recurring (name, cron, endpoint_id, payload, priority)
    values ('nightly', '0 0 * * *', 1, '{"recurring": true}', 0)
    """,
    "insert into ulak.endpoint_headroom (endpoint_id, safe_to) values (1, 1)",
]

SEND = "select ulak.send('shop', jsonb_build_object('key', %s::text, 'n', %s::integer), p_ordering_key => %s)"
CLAIM = "select id, attempt from ulak.claim('w', 1, 'shop')"


def send(session: DB, key: str, number: int) -> None:
    session.execute(SEND, [key, number, key])


def fill(db: DB, sender: DB) -> tuple[int, int]:
    """Of each key of `keys()`, 0 messages or more are done and the rest waits. The sender stays in a transaction, with the
    last message of "uncommitted". Returns the (id, attempt) that worker "w" has in flight."""
    for statement in STATEMENTS[:-9]:
        db.execute(statement)
    # A head that failed and waits; one that is dead; one that waits for its turn; one that is in flight.
    for key in ("retried", "dead", "waiting", "in flight", "uncommitted"):
        for number in (1, 2, 3):
            send(db, key, number)
    id, attempt = claim_key(db, "retried")
    db.execute("select ulak.fail(%s, 'w', %s, 'no luck', '1 hour')", [id, attempt])
    id, attempt = claim_key(db, "dead")
    db.execute("select ulak.fail(%s, 'w', %s, 'no', p_permanent => true)", [id, attempt])
    in_flight = claim_key(db, "in flight")
    # A key whose next message was uncommitted when its head was settled: it waits at infinity, and a note tells of it.
    # The next claim would act on it.
    send(db, "noted", 1)
    claimed = claim_key(db, "noted")
    send(sender, "noted", 2)
    db.execute("select ulak.complete(%s, 'w', %s)", claimed)
    sender.commit()
    send(db, "noted", 3)
    for statement in STATEMENTS[-9:]:
        db.execute(statement)
    if db.execute("select to_regclass('ulak.recurring')").fetchone() != (None,):
        for statement in LATER_STATEMENTS:
            db.execute(statement)
    send(sender, "uncommitted", 4)
    return in_flight


def claim_key(db: DB, key: str) -> tuple[int, int]:
    """The head of a key; what else was claimed on the way is given back."""
    claims = db.execute("select id, attempt, ordering_key from ulak.claim('w', 1000, 'shop')").fetchall()
    for id, attempt, found in claims:
        if found != key:
            db.execute("select ulak.release(%s, 'w', %s)", [id, attempt])
    ((id, attempt),) = [(id, attempt) for id, attempt, found in claims if found == key]
    return id, attempt


# What is left of each key when everything is delivered, in this order.
KEYS = {
    "noted": [2, 3],
    "retried": [1, 2, 3],
    "dead": [2, 3],
    "waiting": [1, 2, 3],
    "in flight": [1, 2, 3],
    "uncommitted": [1, 2, 3, 4],
}
