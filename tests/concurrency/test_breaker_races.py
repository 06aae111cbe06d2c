"""The breaker, the limits and the operator under many sessions: one probe, no deadlock, nothing rewritten."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from threading import Barrier
from typing import Any

import psycopg
from support.queue import Begin, Queue, Sessions
from support.rewritten import rewritten
from support.sessions import Running, gather, patience, wait_until_blocked

# How much each session does.
TURNS, ACTIONS = (400, 1000) if os.environ.get("ULAK_CHAOS") == "full" else (40, 300)

# Heads of ordering keys that are parked: nothing is before them, and no claim will look at them.
FORGOTTEN = """
    select * from (
        select distinct on (endpoint_id, ordering_key) endpoint_id, ordering_key, id, next_retry_at from ulak.queue
        where ordering_key is not null and status in ('pending', 'processing')
        order by endpoint_id, ordering_key, id
    ) head
    where next_retry_at = 'infinity' and not exists (
        select from ulak.queue q
        where (q.endpoint_id, q.ordering_key) = (head.endpoint_id, head.ordering_key)
            and q.status = 'pending'
            and q.next_retry_at < 'infinity'
    )
"""


def deadlocks(queue: Queue) -> int:
    queue.db.execute("select pg_stat_force_next_flush()")
    return int(queue.value("select deadlocks from pg_stat_database where datname = current_database()"))


# The probe.


def test_of_16_sessions_at_the_end_of_a_cooldown_one_gets_the_probe(queue: Queue, sessions: Sessions) -> None:
    rounds = 200
    queue.endpoint(config={"circuit_breaker": {"threshold": 1, "cooldown": 30}}, policy={"max_retries": 1000})
    queue.send_many(rounds + 50)
    barrier = Barrier(16, timeout=patience())

    def claim(session: Queue, worker: str) -> list[int]:
        probes = []
        for number in range(rounds):
            if worker == "0":
                # Each round fails the probe of the one before, which opens the circuit again.
                session.call("reset_circuit_breaker", "shop")
                session.call("update_circuit_breaker", endpoint_id, False, session.at(number * 100))
            barrier.wait()
            claims = session.claim(5, worker=worker, lease=86_400, now=number * 100 + 30)
            probes.append(len(claims))
            barrier.wait()
        return probes

    endpoint_id = queue.value("select id from ulak.endpoints")
    callers = [lambda n=n, s=s: claim(s, str(n)) for n, s in enumerate(sessions(16))]  # type: ignore[misc]
    probes = gather(callers)

    assert [sum(column) for column in zip(*probes, strict=True)] == [1] * rounds
    assert queue.value("select count(*) from ulak.queue where status = 'processing'") == rounds
    assert queue.events("circuit.half_open") == ["circuit.half_open"] * rounds


def test_two_reports_about_one_endpoint_wait_for_each_other(queue: Queue, begin: Begin) -> None:
    endpoint_id = queue.endpoint(config={"circuit_breaker": {"threshold": 2}})
    first, second = begin(), begin()

    assert first.call("update_circuit_breaker", endpoint_id, False) == "closed"
    report = Running(lambda: second.call("update_circuit_breaker", endpoint_id, False))
    wait_until_blocked(second.db, queue.db)
    first.db.commit()

    assert report.result() == "open"
    second.db.commit()


def lock_wait(queue: Queue, limit: str) -> AbstractContextManager[None]:
    """How long a change of a breaker waits for its advisory lock, instead of 100 ms."""
    return rewritten(queue.db, "ulak_private.wait_for_breaker_lock", "'100ms'", f"'{limit}'")


def test_a_change_of_a_breaker_waits_for_its_advisory_lock(queue: Queue, begin: Begin) -> None:
    id = queue.endpoint(config={"circuit_breaker": {"threshold": 1}})
    tool, session = begin(), begin()
    tool.value("select pg_advisory_xact_lock(hashtext('ulak_cb'), %s)", id)

    with lock_wait(queue, "1d"):
        change = Running(lambda: session.call("update_circuit_breaker", id, False))
        assert wait_until_blocked(session.db, queue.db) == [tool.db.info.backend_pid]
        tool.db.rollback()

        assert change.result() == "open"


def test_a_session_that_keeps_advisory_locks_costs_a_transaction_one_wait(queue: Queue, begin: Begin) -> None:
    first, second = (queue.endpoint(name, {"circuit_breaker": {"threshold": 1}}) for name in ("a", "b"))
    tool, session = begin(), begin()
    for id in (first, second):
        tool.value("select pg_advisory_xact_lock(hashtext('ulak_cb'), %s)", id)

    assert session.call("update_circuit_breaker", first, False) == "open"

    with lock_wait(queue, "1d"):
        assert session.call("update_circuit_breaker", second, False) == "open"


def test_a_change_of_a_breaker_holds_its_advisory_lock(queue: Queue, begin: Begin) -> None:
    id = queue.endpoint(config={"circuit_breaker": {"threshold": 2, "cooldown": 30}})
    queue.send_many(2)
    held = """
        select objid::bigint from pg_locks
        where pid = pg_backend_pid() and locktype = 'advisory' and classid = (hashtext('ulak_cb')::bigint & 4294967295)::oid
    """
    changes: list[Callable[[Queue], Any]] = [
        lambda session: session.call("update_circuit_breaker", id, False),
        lambda session: session.fail(session.claim_one()),
        lambda session: session.claim_one(now=60),
        lambda session: session.call("reset_circuit_breaker", "shop"),
    ]

    for change in changes:
        session = begin()
        change(session)
        assert session.column(held) == [id]
        session.db.commit()


def test_failures_reported_by_many_sessions_are_all_counted(queue: Queue, sessions: Sessions) -> None:
    endpoint_id = queue.endpoint(config={"circuit_breaker": {"threshold": 1000}})

    def report(session: Queue) -> None:
        for _ in range(25):
            session.call("update_circuit_breaker", endpoint_id, False)

    gather([lambda session=session: report(session) for session in sessions(8)])  # type: ignore[misc]

    assert queue.circuit()["circuit_failure_count"] == 200


# No deadlocks.


def test_workers_that_meet_two_endpoints_in_opposite_order_never_deadlock(queue: Queue, sessions: Sessions) -> None:
    """Every outcome needs the endpoint's lock: failures count, deaths are announced, and 410 disables."""
    config = {
        "circuit_breaker": {"threshold": 1000, "counts": "all"},
        "url": "https://a.b",
        "auto_disable_on_gone": True,
    }
    # By name they sort the other way round than by id.
    for name in ("z", "a"):
        queue.endpoint(name, config, {"max_retries": 1}, protocol="http")
    for _ in range(TURNS):
        queue.send_many(25, "z")
        queue.send_many(25, "a")

    def work(session: Queue, number: int) -> int:
        worker, settled = f"worker {number}", 0
        for _ in range(TURNS):
            claims = [claim for name in ("z", "a") for claim in session.claim(5, worker=worker, endpoint=name)]
            claims.sort(key=lambda claim: claim.endpoint, reverse=number % 2 == 0)
            errors = [("[RETRYABLE] 503", "[PERMANENT] 400", "[DISABLE] 410")[n % 3] for n in range(len(claims))]
            done = session.value(
                "select ulak_private.settle_many(%s, %s::bigint[], %s::integer[], %s::text[], p_now => %s)",
                worker,
                [claim.id for claim in claims],
                [claim.attempt for claim in claims],
                errors,
                session.at(settled),
            )
            settled += len(done)
            session.call("enable_endpoint", "a" if number % 2 else "z")
        return settled

    before = deadlocks(queue)
    settled = gather([lambda n=n, s=s: work(s, n) for n, s in enumerate(sessions(4))])  # type: ignore[misc]

    assert deadlocks(queue) == before
    assert min(settled) > 0


def test_claim_settle_reset_disable_alter_and_all_the_rest_never_deadlock(queue: Queue, sessions: Sessions) -> None:
    names = ["z", "limited", "m", "a"]
    configs: dict[str, dict[str, Any]] = {
        "z": {"circuit_breaker": {"threshold": 3, "cooldown": 5}},
        "limited": {"rate_limit": {"limit": 100_000, "interval": "second"}, "max_in_flight": 500},
        "m": {"circuit_breaker": {"mode": "rate", "min_requests": 5, "cooldown": 5}},
        "a": {"circuit_breaker": {"threshold": 2, "cooldown": 5, "counts": "all"}},
    }
    for name in names:
        queue.endpoint(name, configs[name], {"max_retries": 1, "backoff": "schedule", "schedule": [0]})
    done: Counter[str] = Counter()
    ticks = count()

    def act(session: Queue, seed: int) -> None:
        rng = random.Random(seed)
        worker = f"worker {seed}"

        def send() -> None:
            for _ in range(5):
                session.send(rng.choice(names), ordering_key=rng.choice([None, "k", "l"]), expires_at=now() + 30)

        def work() -> None:
            """Settles and claims in one transaction, as the worker does."""
            with session.db.transaction():
                settle()
                for claim in session.claim(rng.choice([1, 20]), worker=worker, lease=20, now=now()):
                    if rng.random() < 0.1:
                        session.release(claim, worker=worker, now=now())

        def settle() -> None:
            held = session.rows(
                "select id, attempts from ulak.queue where locked_by = %s and status = 'processing'", worker
            )
            rng.shuffle(held)
            errors = [rng.choice([None, "[RETRYABLE] 503", "[PERMANENT] 400", "[DISABLE] 410"]) for _ in held]
            session.value(
                "select ulak_private.settle_many(%s, %s::bigint[], %s::integer[], %s::text[], p_now => %s)",
                worker,
                [row["id"] for row in held],
                [row["attempts"] for row in held],
                errors,
                session.at(now()),
            )

        def now() -> float:
            return next(ticks) * 0.02

        def alter() -> None:
            name = rng.choice(names)
            session.call("alter_endpoint", name, configs[name] | {"max_in_flight": rng.choice([50, 100])})

        actions: dict[str, Callable[[], object]] = {
            "send": send,
            "work": work,
            "recover": lambda: session.recover(now()),
            "expire": lambda: session.expire(now()),
            "reset": lambda: session.call("reset_circuit_breaker", rng.choice(names)),
            "disable": lambda: session.call("disable_endpoint", rng.choice(names)),
            "enable": lambda: session.call("enable_endpoint", rng.choice(names), rng.choice([None, 1000.0])),
            "alter": alter,
            "redrive": lambda: session.call("redrive", limit=5),
            "bury": lambda: session.value(
                "select ulak.archive_single_to_dlq(id) from ulak.queue where status = 'pending' limit 1"
            ),
        }
        for _ in range(ACTIONS):
            name = rng.choices(list(actions), [4, 8, 1, 1, 1, 1, 2, 1, 1, 1])[0]
            try:
                actions[name]()
            except psycopg.errors.ObjectNotInPrerequisiteState:
                # Somebody else settled or claimed it first.
                continue
            done[name] += 1

    before = deadlocks(queue)
    gather([lambda n=n, s=s: act(s, n) for n, s in enumerate(sessions(8))])  # type: ignore[misc]

    assert deadlocks(queue) == before
    assert len(done) == 10
    finished = queue.column("select distinct status from ulak.messages")
    assert {"completed", "failed"} <= set(finished)
    assert queue.rows(FORGOTTEN) == []


def test_claiming_and_settling_in_one_transaction_never_deadlocks(queue: Queue, begin: Begin) -> None:
    """A claim of a limited endpoint locks its row, as settling does."""
    queue.endpoint(config={"max_in_flight": 10})
    queue.send_many(2)
    other = queue.claim_one(worker="other")
    both, settler = begin(), begin()
    claim = both.claim_one()

    report = Running(lambda: settler.fail(other, worker="other"))
    wait_until_blocked(settler.db, queue.db)
    both.fail(claim)
    both.db.commit()

    report.result()
    settler.db.commit()


def test_a_claim_of_a_healthy_endpoint_locks_no_endpoint(queue: Queue, begin: Begin) -> None:
    queue.endpoint()
    queue.send_many(2)
    claimer = begin()
    claimer.claim_one()

    locks = "select count(*) from pg_locks where pid = %s and locktype = 'advisory'"
    assert queue.value(locks, claimer.db.info.backend_pid) == 0
    assert len(queue.rows("select from ulak.endpoints for update nowait")) == 1


def test_a_claim_shows_the_breakers_lock_only_where_the_circuit_is_troubled(queue: Queue, begin: Begin) -> None:
    queue.endpoint("limited", {"max_in_flight": 5, "rate_limit": {"limit": 100, "interval": "second"}})
    probed = queue.endpoint("probed")
    for name in ("limited", "probed"):
        queue.send_many(2, name)
    queue.db.execute(
        "update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = now() where id = %s", [probed]
    )
    claimer = begin()

    assert Counter(claim.endpoint for claim in claimer.claim(10)) == {"limited": 2, "probed": 1}

    shown = "select objid::bigint from pg_locks where pid = %s and locktype = 'advisory'"
    assert queue.column(shown, claimer.db.info.backend_pid) == [probed]


def test_a_claim_does_not_lock_an_endpoint_without_a_token(queue: Queue, begin: Begin) -> None:
    queue.endpoint(config={"rate_limit": {"limit": 1, "interval": "hour"}})
    queue.send_many(2)
    queue.claim_one()
    claimer = begin()

    assert claimer.claim(10) == []

    assert len(queue.rows("select from ulak.endpoints for update nowait")) == 1


# Limits shared by claimers at once.


def test_a_rate_limit_is_shared_by_four_claimers(queue: Queue, sessions: Sessions) -> None:
    """100 a second over 10 s in steps of 50 ms: at least 95% and never more than the limit and the burst."""
    queue.endpoint(config={"rate_limit": {"limit": 100, "interval": "second"}})
    queue.send_many(1500)
    steps, barrier = 200, Barrier(4, timeout=patience())

    def claim(session: Queue, worker: str) -> list[int]:
        passed = []
        for step in range(1, steps + 1):
            barrier.wait()
            # The clocks of two machines differ by a millisecond.
            passed.append(len(session.claim(100, worker=worker, now=step * 0.05 - 0.001 * (int(worker) % 2))))
        return passed

    passed = gather([lambda n=n, s=s: claim(s, str(n)) for n, s in enumerate(sessions(4))])  # type: ignore[misc]

    total, burst = 0, 10
    for step, column in enumerate(zip(*passed, strict=True), 1):
        total += sum(column)
        assert total <= 100 * step * 0.05 + burst
    assert 950 <= total <= 1000 + burst


def test_disabling_stops_claims_at_once(queue: Queue, begin: Begin) -> None:
    queue.endpoint()
    queue.endpoint("limited", {"max_in_flight": 5})
    queue.send_many(10)
    queue.send_many(10, "limited")
    operator = begin()
    operator.call("disable_endpoint", "shop")
    operator.call("disable_endpoint", "limited")

    # A claim doesn't wait for the operator: it skips a limited endpoint, and sees any other as it was.
    assert {claim.endpoint for claim in queue.claim(4)} == {"shop"}
    operator.db.commit()

    assert queue.claim(10) == []


# Nothing is rewritten.


def test_claiming_beside_an_open_circuit_writes_no_version_of_its_messages(queue: Queue) -> None:
    queue.endpoint(config={"circuit_breaker": {"threshold": 1, "cooldown": 3600}})
    queue.endpoint("healthy")
    queue.send_many(100_000)
    endpoint_id = queue.value("select id from ulak.endpoints where name = 'shop'")
    assert queue.call("update_circuit_breaker", endpoint_id, False, queue.at(0)) == "open"
    written = "select n_tup_upd + n_tup_del + n_tup_ins from pg_stat_xact_user_tables where relid = 'ulak_private.deliveries'::regclass"

    # In one transaction, so that only what it writes itself is counted.
    with queue.db.transaction():
        before = queue.value(written)
        for second in range(60):
            for worker in ("a", "b"):
                assert queue.claim(500, worker=worker, now=second) == []
            assert queue.recover(now=second) == queue.expire(now=second) == 0
        assert queue.value(written) == before

        queue.send("healthy")
        assert len(queue.claim(500, now=60)) == 1
        assert queue.value(written) == before + 2
