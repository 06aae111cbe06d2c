"""At least one row in every table, for tests that carry a database from one place to another."""

from __future__ import annotations

from typing import Any

import psycopg

STATEMENTS = [
    "select ulak.configure('batch_size', '123')",
    "select ulak.set_secret('filled', 'not to be seen')",
    "select ulak.create_endpoint('filled_pull', 'pull', '{\"max_pending\": 1000}', '{\"max_retries\": 0}')",
    """
    select ulak.create_endpoint(
        'filled_http', 'http', '{"url": "https://example.com/hook", "auth": {"type": "bearer", "token": {"$secret": "filled"}}}'
    )
    """,
    "select ulak.grant_endpoint('filled_pull', 'ulak_consumer')",
    "select ulak.create_event_type('filled.event', 'an event', '{\"type\": \"object\"}')",
    "select ulak.grant_event_type('filled.event', 'ulak_application')",
    "select ulak.grant_endpoint('filled_http', 'ulak_application', 'send')",
    "select ulak.subscribe('filled.event', 'filled_http', p_body => '{\"n\": 1}')",
    "select ulak.subscribe('ulak.message.dead', 'filled_http')",
    "select ulak.subscribe('ulak.endpoint.dead_letters', 'filled_http')",
    """
    insert into ulak.recurring (name, cron, endpoint_id, payload, priority)
    select 'filled', '0 0 1 1 *', id, '1', 0 from ulak.endpoints where name = 'filled_http'
    """,
    """
    insert into ulak.watches (table_name, event_type, operations, columns, bound_to, bindings)
    values ('filled', 'filled.event', '{insert}', '{id}', 0, '{}')
    """,
    # A message in each state: pending, ordered, in flight, completed, dead, expired, archived by month and by default.
    "select ulak.send('filled_http', '{\"n\": 1}', p_idempotency_key => 'filled', p_headers => '{\"x-a\": \"b\"}')",
    "select ulak.send('filled_http', '{\"n\": 2}', p_ordering_key => 'k') from generate_series(1, 2)",
    "select ulak.send('filled_pull', jsonb_build_object('n', n)) from generate_series(3, 8) n",
    "select ulak.complete(c.id, 'filler', c.attempt) from ulak.claim('filler', 2, 'filled_pull') c",
    "select ulak.fail(c.id, 'filler', c.attempt, 'broken') from ulak.claim('filler', 1, 'filled_pull') c",
    "select count(*) from ulak.claim('filler', 1, 'filled_pull')",
    "insert into ulak_private.events (id, created_at, payload) values (-1, '1999-01-01', '{}')",
    "insert into ulak_private.archived (id, event_id, endpoint_id, status, created_at) values (-1, -1, 1, 'completed', '1999-01-01')",
    "insert into ulak.endpoint_stats (endpoint_id, minute, delivered) values (1, date_trunc('minute', now()), 1)",
    "insert into ulak.endpoint_totals (endpoint_id, delivered) values (1, 1)",
    "insert into ulak.backlog_samples (endpoint_id, sampled_at, waiting, dead) values (1, now(), 1, 0)",
    "insert into ulak.traffic (minute) values (date_trunc('minute', now()))",
    "insert into ulak.handled values ('consumer', 'key')",
    """
    insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version)
    values (1, 'filler', 1, 'stopped', now(), now(), now(), '0')
    """,
    "insert into ulak_private.schedule (workers) values (2)",
    """
    insert into ulak_private.maintenance_runs (step, started_at, duration, rows, finished, runs, errors, total_rows)
    values ('filled', now(), '1 s', 1, true, 1, 0, 1)
    """,
]


def fill(connection: psycopg.Connection[Any]) -> None:
    for statement in STATEMENTS:
        connection.execute(statement)
