"""Every public function that takes the time refuses absurd times, and uses the clock without one."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster

DB = psycopg.Connection[Any]

# What the parameters without a default are given: each names something that exists.
GIVEN = {
    "p_at": "now()",
    "p_archive_id": "(select min(id) from ulak.archive)",
    "p_attempt": "1",
    "p_attempts": "'{1}'",
    "p_dlq_id": "(select min(id) from ulak.dlq where status = 'failed')",
    "p_endpoint": "'shop'",
    "p_endpoint_id": "1",
    "p_error": "'broken'",
    "p_errors": "'{broken}'",
    "p_from_ts": "'-infinity'",
    "p_id": "(select min(id) from ulak.queue where status = 'processing')",
    "p_idempotency_key": "'k'",
    "p_ids": "array(select min(id) from ulak.queue where status = 'processing')",
    "p_limit": "1",
    "p_message_id": "(select min(id) from ulak.queue where status = 'pending')",
    "p_name": "'shop'",
    "p_priority": "1",
    "p_success": "true",
    "p_to_ts": "'infinity'",
    "p_worker": "'w'",
}

ABSURD = ["infinity", "-infinity", "294276-12-31", "10000-01-01", "1969-12-31", "4713-01-01 BC"]

# Name, kind, and the parameters without a default.
FUNCTIONS = """
    select p.proname, p.prokind, coalesce((
        select array_agg(a.name order by a.place)
        from unnest(p.proargnames, coalesce(p.proargmodes, array_fill('i'::"char", array[cardinality(p.proargnames)])))
            with ordinality a(name, mode, place)
        where a.mode in ('i', 'b') and a.place <= p.pronargs - p.pronargdefaults
    ), '{}')
    from pg_proc p
    where p.pronamespace = 'ulak'::regnamespace and 'p_now' = any (p.proargnames)
    order by 1
"""

# A message that is in flight, one that waits, a dead letter and an archived one.
ROWS = [
    "select ulak.create_endpoint('shop', 'http', jsonb_build_object('url', 'https://example.com/hook', "
    "'signing_secret', 'whsk_' || repeat('A', 43)))",
    "select ulak.send('shop', jsonb_build_object('n', n)) from generate_series(1, 5) n",
    "select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w', 1, 'shop') c",
    "select ulak.fail(c.id, 'w', c.attempt, 'broken', p_permanent => true) from ulak.claim('w', 1, 'shop') c",
    "select ulak.archive_completed_messages(0, 1, now() + '1 s')",
    "select count(*) from ulak.claim('w', 1, 'shop', '1 hour')",
    "select ulak.create_endpoint('pulled', 'pull', '{}')",
    "select ulak.send('pulled', '{}')",
    """
    insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version)
    values (1, 'w', 1, 'stopped', now(), now(), now(), '0')
    """,
]


# What a call without it is refused for.
WANTED = {"discard": "p_since => '-infinity', "}


@pytest.fixture(scope="module")
def filled(module_database: str, module_session: psycopg.Connection[Any]) -> str:
    for statement in ROWS:
        module_session.execute(statement)
    return module_database


@pytest.fixture(scope="module")
def calls(cluster: Cluster, filled: str) -> dict[str, str]:
    """A call of each function, with a place for its p_now."""
    with cluster.connect(filled) as db:
        functions = db.execute(FUNCTIONS).fetchall()
    calls = {}
    for name, kind, required in functions:
        given = "".join(f"{parameter} => {GIVEN[parameter]}, " for parameter in required if parameter != "p_now")
        given += WANTED.get(name, "")
        calls[name] = f"{'call' if kind == 'p' else 'select'} ulak.{name}({given}p_now => %s::timestamptz)"
        if kind == "p":
            # A procedure's arguments are no queries.
            assert "select" not in given
    return calls


def test_a_time_beyond_reckoning_is_refused_and_nothing_is_changed(
    cluster: Cluster, filled: str, calls: dict[str, str]
) -> None:
    accepted = []
    with cluster.connect(filled) as db, cluster.connect(filled) as other:
        before = catalog.contents(other)
        for name, call in calls.items():
            for time in ABSURD:
                try:
                    db.execute(call, [time])
                    accepted.append((name, time))
                except psycopg.errors.InvalidParameterValue as refusal:
                    assert refusal.diag.message_primary == "p_now must be a time between the years 1970 and 9000"
        after = catalog.contents(other)

    assert accepted == []
    assert catalog.lost(before, after) == catalog.lost(after, before) == []
    assert len(calls) > 30


def test_no_time_is_the_time_of_the_clock(cluster: Cluster, filled: str, calls: dict[str, str]) -> None:
    """Null does what leaving it out does. A procedure commits, so it is the last."""
    found = {}
    with cluster.connect(filled) as db:
        for name, call in sorted(calls.items(), key=lambda item: item[1].startswith("call")):
            counts = []
            for p_now in (", p_now => null)", ")"):
                spelled = call.replace("p_now => %s::timestamptz)", p_now.removeprefix(", ")).replace(", )", ")")
                if call.startswith("call"):
                    db.execute(spelled)
                    continue
                with db.transaction(force_rollback=True):
                    counts.append(len(db.execute(spelled).fetchall()))
            found[name] = counts

    assert {
        name: counts for name, counts in found.items() if counts and (counts[0] != counts[1] or not counts[0])
    } == {}
