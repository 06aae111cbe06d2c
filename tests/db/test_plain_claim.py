"""The usual claim of an external worker takes a short way, which locks exactly what a claim by ulak_private.take_turn() does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cluster import Cluster
from support.messages import insert_messages
from support.queue import DB, Queue

# A session that has read the settings, as a worker does, takes the general way.
GENERAL = "select set_config('ulak_private.settings', (select fingerprint from ulak_private.session_settings), true)"

STATE = """
    select jsonb_agg(to_jsonb(s) order by s.id), 'deliveries' from ulak_private.deliveries s
    union all
    select jsonb_agg(to_jsonb(s) order by s.id), 'archived' from ulak_private.archived s
    union all
    select jsonb_agg(to_jsonb(s) order by s.id), 'endpoints' from ulak.endpoints s
    order by 2
"""


@dataclass(frozen=True)
class Message:
    priority: int
    key: str | None
    is_identified: bool
    generation: int | None
    due: int
    expires: int | None
    days_old: int
    is_traced: bool
    # Null: it waits. Otherwise a worker has it, until then.
    worker: str | None
    lease: int
    attempts: int
    is_locked: bool


messages = st.builds(
    Message,
    priority=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 3]),
    key=st.sampled_from([None, None, None, None, None, "k", "l"]),
    is_identified=st.sampled_from([False, False, True]),
    generation=st.sampled_from([None, None, None, 1]),
    due=st.sampled_from([-100, -50, -50, -1, 0, 1, 100]),
    expires=st.sampled_from([None, None, None, None, -5, 50]),
    days_old=st.sampled_from([0, 0, 0, 40]),
    is_traced=st.sampled_from([False, False, True]),
    worker=st.sampled_from([None, None, None, "w", "w", "x"]),
    lease=st.sampled_from([-2, 100, 100, 100]),
    attempts=st.integers(1, 12),
    is_locked=st.sampled_from([False, False, False, True]),
)
plain_messages = st.builds(
    Message,
    priority=st.just(0),
    key=st.none(),
    is_identified=st.booleans(),
    generation=st.none(),
    due=st.sampled_from([-100, -50, 0, 1]),
    expires=st.none(),
    days_old=st.sampled_from([0, 40]),
    is_traced=st.booleans(),
    worker=st.sampled_from([None, None, None, "w"]),
    lease=st.just(100),
    attempts=st.integers(1, 3),
    is_locked=st.sampled_from([False, False, True]),
)
endpoints = st.sampled_from(
    [
        *["true"] * 12,
        "enabled = false",
        "config = '{\"max_in_flight\": 3}'",
        'config = \'{"rate_limit": {"limit": 2, "burst": 2}}\'',
        'config = \'{"announce": ["delivered"]}\'',
        "circuit_state = 'open', circuit_half_open_at = 'infinity'",
        "circuit_state = 'open', circuit_half_open_at = '-infinity'",
        "circuit_state = 'half_open'",
        # Another failure opens it.
        "circuit_failure_count = 9",
        "slow_start_limit = 2",
        "release_rate = 1",
    ]
)


@dataclass(frozen=True)
class Turn:
    limit: int
    generation: int | None
    lease: str | None
    is_wrong: bool
    errors: str
    aging: int


turns = st.builds(
    Turn,
    limit=st.sampled_from([0, 1, 2, 5, 20, 20, 20]),
    generation=st.sampled_from([None, None, None, 1]),
    lease=st.sampled_from([None, "1 minute"]),
    is_wrong=st.booleans(),
    errors=st.sampled_from(["none", "nulls", "some"]),
    aging=st.sampled_from([0, 0, 10]),
)


def fill(queue: Queue, waiting: list[Message], endpoint: str) -> list[tuple[int, Message]]:
    queue.empty()
    id = queue.endpoint("shop")
    if endpoint != "true":
        queue.db.execute(f"update ulak.endpoints set {endpoint}")  # type: ignore[arg-type]
    rows = []
    for number, each in enumerate(waiting):
        (message,) = insert_messages(
            queue.db,
            created_at=queue.at(-each.days_old * 86400 - 200),
            headers={"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}
            if each.is_traced
            else None,
            metadata={"m": 1},
            endpoint_id=id,
            priority=each.priority,
            ordering_key=each.key,
            idempotency_key=f"i{number}" if each.is_identified else None,
            generation=each.generation,
            next_retry_at=queue.at(each.due),
            expires_at=None if each.expires is None else queue.at(each.expires),
            status="processing" if each.worker else "pending",
            attempts=each.attempts,
            retry_count=each.attempts,
            locked_by=each.worker,
            lease_until=queue.at(each.lease) if each.worker else None,
        )
        rows.append((message, each))
    return rows


def take(queue: Queue, turn: Turn, held: list[tuple[int, Message]], general: bool) -> tuple[Any, Any]:
    """What the turn returned, and what it left behind; then all of it is undone."""
    ids = [id for id, _ in held]
    attempts = [each.attempts + (turn.is_wrong and id % 2) for id, each in held]
    errors = {"none": None, "nulls": [None for _ in ids], "some": ["broken" if id % 2 else None for id in ids]}[
        turn.errors
    ]
    with queue.db.transaction(force_rollback=True):
        queue.call("configure", "priority_aging", str(turn.aging))
        if general:
            queue.db.execute(GENERAL)
        rows = queue.rows(
            """
            select * from ulak.work(
                'w', %s, 'shop', %s::bigint[], %s::integer[], %s::text[], p_lease => %s, p_generation => %s, p_now => %s
            )
            """,
            turn.limit,
            ids,
            attempts,
            errors,
            turn.lease,
            turn.generation,
            queue.at(0),
        )
        return rows, queue.rows(STATE)


@pytest.fixture(scope="module")
def queue(module_session: DB) -> Queue:
    return Queue(module_session)


def test_a_turn_is_the_same_by_both_ways(cluster: Cluster, module_database: str, queue: Queue) -> None:
    with cluster.connect(module_database, autocommit=False) as other:

        @settings(
            max_examples=300,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(
            st.lists(messages | plain_messages, max_size=8) | st.lists(plain_messages, min_size=3, max_size=8),
            endpoints,
            turns,
        )
        def both_ways(waiting: list[Message], endpoint: str, turn: Turn) -> None:
            rows = fill(queue, waiting, endpoint)
            other.execute(
                "select from ulak_private.deliveries where id = any (%s) for update",
                [[id for id, each in rows if each.is_locked and each.worker != "w"]],
            )
            held = [(id, each) for id, each in rows if each.worker == "w"]
            try:
                assert take(queue, turn, held, general=False) == take(queue, turn, held, general=True)
            finally:
                other.rollback()

        both_ways()


def general_claim_is_gone(queue: Queue) -> None:
    queue.db.execute(
        r"""
        do $$
        begin
            execute regexp_replace(
                pg_get_functiondef((select p.oid from pg_proc p where p.oid::regproc::text = 'ulak_private.take_turn')),
                E'\nbegin\n', E'\nbegin\n    perform 1 / 0;\n'
            );
        end
        $$
        """
    )


def test_usual_messages_of_a_named_endpoint_take_the_short_way(queue: Queue) -> None:
    queue.empty()
    queue.endpoint("shop")
    ids = queue.send_many(3)

    with queue.db.transaction(force_rollback=True):
        general_claim_is_gone(queue)
        claims = queue.claim(2, endpoint="shop")
        queue.complete(claims[0])
        claims += queue.claim(2, endpoint="shop")

        assert [claim.id for claim in claims] == ids
        assert queue.claim(1, endpoint="shop") == []


def test_a_turn_that_finds_nothing_does_not_make_its_session_the_one_that_looks_again_soon(queue: Queue) -> None:
    queue.empty()
    queue.endpoint("shop")
    queue.db.execute("select setval('ulak_private.last_finder', 1)")
    finder = "select pg_sequence_last_value('ulak_private.last_finder')"

    assert (queue.claim(1, endpoint="shop"), queue.value(finder)) == ([], 1)

    queue.send()
    assert (len(queue.claim(1, endpoint="shop")), queue.value(finder)) == (1, queue.db.info.backend_pid)


@pytest.mark.parametrize("options", [{"priority": 1}, {"ordering_key": "k"}, {"generation": 1}])
def test_unusual_ones_do_not(queue: Queue, options: dict[str, Any]) -> None:
    queue.empty()
    queue.endpoint("shop")
    for _ in range(2):
        queue.send(**options)

    with queue.db.transaction(force_rollback=True):
        general_claim_is_gone(queue)

        with pytest.raises(psycopg.errors.DivisionByZero):
            queue.claim(2, endpoint="shop", generation=options.get("generation"))
