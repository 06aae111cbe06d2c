"""A worker's life: it takes a slot, works, and leaves when it should."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest
from support.cluster import Cluster
from support.defects import install_defect
from support.errors import refused
from support.gate import gate
from support.hostile import Hostile, never_answers
from support.node import Held
from support.receiver import Receiver
from support.rewritten import rewritten
from support.sessions import Running, stop_between_transactions, wait_until, wait_until_blocked, wait_until_gone
from support.site import LONG, LONGEST_TIMEOUT, Site, WorkerSession

HELD = "select count(*) from ulak.queue where status = 'processing'"
LEASE = 3600


def test_a_worker_delivers_and_tells_about_itself(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.http("down", "http://127.0.0.1:9/")
    worker = site.start(slot=3)
    first = site.worker_row(worker)
    for n in range(20):
        site.send("shop", {"n": n})
    site.send("down")

    receiver.wait_for(20)
    # It counts a message as soon as it has the answer, and holds it until that is stored.
    row = wait_until(lambda: (r := site.worker_row(worker))["messages_processed"] == 21 and r["in_flight"] == 0 and r)

    assert (row["slot"], row["state"], row["error_count"]) == (3, "running", 1)
    assert row["last_error"].startswith("[RETRYABLE] connect")
    assert row["started_at"] == first["started_at"] < row["last_activity"] <= row["heartbeat_at"]
    assert site.value("select application_name from pg_stat_activity where pid = %s", worker.pid) == (
        f"ulak worker 3, pid {worker.pid}"
    )


def test_what_is_in_flight_is_in_the_workers_row(site: Site) -> None:
    with Hostile(never_answers) as hanging:
        site.http("hanging", hanging.url, timeout=LONGEST_TIMEOUT)
        worker = site.start()
        site.send_many(5, "hanging")

        wait_until(lambda: site.worker_row(worker)["in_flight"] == 5)


def test_a_slot_runs_once(site: Site) -> None:
    first = site.start(slot=1)

    second = site.start(slot=1)
    second.result()
    third = site.start()

    assert second.notices == ["another session runs this worker slot"]
    assert not first.call.is_done()
    assert site.worker_row(third)["slot"] == 2


DEAD = """
    insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version, backend_start)
    select 1, 'a dead one', a.pid, 'running', now(), now(), now(), '0', a.backend_start - interval '1 s'
    from pg_stat_activity a where a.pid = pg_backend_pid()
"""


def test_a_slot_is_free_when_its_session_is_gone(site: Site) -> None:
    """However young its row is, and though another session has its pid by now."""
    site.db.execute(DEAD)  # type: ignore[arg-type]
    assert site.column("select state from ulak.get_worker_status()") == ["lost"]

    worker = site.start()

    assert site.worker_row(worker)["slot"] == 1
    assert site.column("select state from ulak.get_worker_status()") == ["running"]


def test_a_worker_that_hangs_is_replaced_and_leaves_when_it_wakes_up(site: Site) -> None:
    hanging = site.start(slot=1)
    with site.cluster.connect(site.database) as db:
        stop_between_transactions(site.value, hanging.pid)
        db.execute("update ulak.workers set heartbeat_at = heartbeat_at - interval '3 min'")

    another = site.start(slot=1)
    os.kill(hanging.pid, signal.SIGCONT)
    hanging.result()

    assert site.worker_row(another)["slot"] == 1
    assert not another.call.is_done()


HANDOVER = "_HANDOVER_SECONDS = 8.0\n"
LONG_HANDOVER = "_HANDOVER_SECONDS = 3600.0\n"


def test_a_scheduled_run_waits_for_the_one_before_it(cluster: Cluster, database: str, tmp_path: Path) -> None:
    with closing(Site(cluster, database)) as site:
        install_defect(site.db, tmp_path, "entry_points.py", HANDOVER, LONG_HANDOVER)
        first = site.start(slot=1)

        with rewritten(site.db, "ulak_private.take_worker_slot", "\nbegin\n", "\nbegin\nraise notice 'looking';\n"):
            second = site.begin(1, is_scheduled=True)
            wait_until(lambda: second.notices.count("looking") >= 2, "a second look")
            pids = site.column("select pid from ulak.workers")
            first.end()

        assert pids == [first.pid]
        wait_until(lambda: site.value("select pid from ulak.workers") == second.pid)
        assert site.worker_row(second)["is_scheduled"]


def test_there_are_32_slots(site: Site) -> None:
    refusal = refused(site.db, "call ulak.run_worker(33)")

    assert refusal.sqlstate == "22023"
    assert (refusal.message_primary or "").endswith("worker slots are numbered from 1 to 32")


def test_a_run_ends_just_after_the_next_minute_unless_it_is_given_another_time(site: Site) -> None:
    query = "select seconds from ulak_private.take_worker_slot(%s, %s, false)"

    with rewritten(
        site.db, "ulak_private.take_worker_slot", "clock_timestamp()", "timestamptz '2026-01-01 12:34:41.5+00'"
    ):
        seconds = [site.value(query, slot, given) for slot, given in ((1, None), (2, None), (3, 0.3))]

    assert seconds == pytest.approx([18.7, 18.9, 0.3])


def test_a_run_ends_when_its_time_is_over(site: Site) -> None:
    worker = site.start(seconds=0.3)

    worker.result()

    assert site.worker_row(worker)["state"] == "stopped"


def test_a_run_that_ends_during_a_look_is_not_taken_for_dead(site: Site) -> None:
    site.http("shop", "http://127.0.0.1:9/")
    worker = site.start()
    with site.connect() as session:
        site.db.execute("select pg_advisory_lock(1)")
        # Its snapshot is from now, and what it asks about sessions is from after the wait.
        query = """
            select h.status from (select pg_advisory_lock_shared(1) offset 0) l, lateral (
                select c.status from ulak.health_check() c where c.component = 'workers' and l is not null
            ) h
        """
        look = Running(lambda: session.execute(query).fetchone())
        wait_until_blocked(session, site.db)
        site.call("stop")
        worker.result()
        worker.end()
        wait_until_gone(worker.pid, site.db)
        site.db.execute("select pg_advisory_unlock(1)")

        assert look.result() == ("ok",)


def test_the_session_is_as_before_when_a_run_is_over(site: Site) -> None:
    query = """
        select name, setting from pg_settings
        where name in ('jit', 'lock_timeout', 'synchronous_commit', 'application_name', 'DateStyle')
    """
    with site.connect() as session:
        session.execute("set search_path = shop, public")
        before = session.execute(query).fetchall()

        session.execute("call ulak.run_worker(p_seconds => 0.2)")
        session.execute("call ulak.run_maintenance()")

        assert session.execute(query).fetchall() == before
        assert session.execute("show search_path").fetchone() == ("shop, public",)
        locks = "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"
        assert session.execute(locks).fetchone() == (0,)


def test_a_worker_that_may_open_few_files_says_so(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    session = site.connect("ulak_worker")
    resource.prlimit(session.info.backend_pid, resource.RLIMIT_NOFILE, (64, 64))

    site.workers.append(WorkerSession(session, 1, LONG))

    limit = (
        "a process may have 64 files open, which is enough for 2 requests in flight; worker_concurrency asks for 128"
    )
    wait_until(lambda: site.value("select limited_by from ulak.workers") == limit)
    finding, event = site.rows("""
        select finding as said from ulak.doctor() where "check" = 'workers'
        union all select detail ->> 'limited_by' from ulak.event_log where event = 'worker.limited'
    """)
    assert finding["said"] == f"worker 1, pid {session.info.backend_pid} is slower than it could be: {limit}"
    assert event["said"] == limit


def test_a_worker_leaves_when_it_is_asked_to(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    workers = [site.start(), site.start()]

    asked = site.rows("select * from ulak.stop()")

    assert sum(row["detail"] == "asked to leave" for row in asked) == 2
    for worker in workers:
        worker.result()
        assert site.worker_row(worker)["state"] == "stopped"


def test_a_worker_that_starts_after_a_stop_works(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.start(slot=1)
    site.db.execute("select ulak.stop()")
    site.workers[0].result()

    site.start(slot=1)
    site.send()

    receiver.wait_for(1)


def late_run(site: Site, slot: int, asked: str) -> WorkerSession:
    """A run that pg_cron was just starting when workers were asked to leave."""
    with gate(site.db):
        late = site.begin(slot, is_scheduled=True)
        wait_until_blocked(late.pid, site.db)
        site.db.execute(asked)  # type: ignore[arg-type]
    return late


@pytest.mark.parametrize(("slot", "asked"), [(1, "select ulak.stop()"), (2, "select ulak_private.limit_workers(1)")])
def test_a_run_that_pg_cron_was_starting_meanwhile_leaves_too(
    site: Site, receiver: Receiver, slot: int, asked: str
) -> None:
    site.http("shop", receiver.url)
    site.send()

    late_run(site, slot, asked).result()

    assert receiver.requests == []


def test_a_run_that_pg_cron_was_starting_goes_on_if_it_is_still_wanted(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.send()

    late_run(site, 1, "select ulak_private.limit_workers(1)")

    receiver.wait_for(1)


def test_a_worker_that_is_asked_to_leave_gives_back_what_hangs(site: Site) -> None:
    with Hostile(never_answers) as hanging:
        site.http("hanging", hanging.url, timeout=LONGEST_TIMEOUT)
        worker = site.start()
        id = site.send("hanging")
        site.wait_for_status(id, "processing")

        site.db.execute("select ulak.stop()")

        worker.result()
        message = site.message(id)
        assert (message["status"], message["attempts"], message["retry_count"]) == ("pending", 1, 0)


HAS_REPORTED_AGAIN = "select heartbeat_at > started_at + interval '0.5 s' from ulak.workers where pid = %s"


def test_a_worker_leaves_for_another_build_or_version(site: Site) -> None:
    build = site.value("select pg_get_functiondef('ulak_private.python_stamp()'::regprocedure)")
    version = site.value("select extversion from pg_extension where extname = 'ulak'")
    for there, back in (
        ("create or replace function ulak_private.python_stamp() returns text stable language sql return 'new'", build),
        (
            f"update pg_extension set extversion = '{version}.1' where extname = 'ulak'",
            f"update pg_extension set extversion = '{version}' where extname = 'ulak'",
        ),
    ):
        worker = site.start()
        # By its second report it has looked for another build.
        wait_until(partial(site.value, HAS_REPORTED_AGAIN, worker.pid), "a second report")
        site.db.execute(there)
        # As an upgrade does when it is done.
        site.db.execute("select ulak_private.wake_workers()")

        try:
            worker.result()
        finally:
            site.db.execute(back)


def test_changed_settings_hold_for_a_worker_that_runs(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    worker = site.start()
    site.send()
    receiver.wait_for(1)

    site.configure(http_allowed_networks="")

    error = wait_until(lambda: site.send() and site.value("select max(last_error) from ulak.dlq"))
    assert error == (
        "[PERMANENT] blocked: address 127.0.0.1 is blocked (loopback, 127.0.0.0/8); "
        "to allow it: select ulak.configure('http_allowed_networks', '127.0.0.0/8');"
    )
    assert not worker.call.is_done()


def test_an_idle_worker_can_be_cancelled_and_terminated(site: Site) -> None:
    cancelled, terminated = site.start(), site.start()

    site.db.execute("select pg_cancel_backend(%s)", [cancelled.pid])
    with pytest.raises(psycopg.errors.QueryCanceled):
        cancelled.result()
    site.db.execute("select pg_terminate_backend(%s)", [terminated.pid])
    wait_until_gone(terminated.pid, site.db)

    assert site.worker_row(cancelled)["state"] == "stopped"
    # The session lives on, and the slot is free.
    with cancelled.connection as session:
        session.execute("call ulak.run_worker(1, 0.1)")


def test_a_worker_that_is_cancelled_gives_back_what_it_holds_and_leaves_what_is_done(site: Site) -> None:
    with Held() as slow, Receiver() as quick:
        site.http("slow", slow.receiver.url, timeout=LONGEST_TIMEOUT)
        site.http("quick", quick.url)
        worker = site.start()
        held = site.send_many(100, "slow")
        slow.receiver.wait_for(100)
        done = site.send("quick")
        site.wait_for_status(done, "completed")

        site.db.execute("select pg_cancel_backend(%s)", [worker.pid])
        with pytest.raises(psycopg.errors.QueryCanceled):
            worker.result()

        assert site.status(done) == "completed"
        rows = site.rows(
            "select status, attempts, retry_count, next_retry_at <= now() as due from ulak.queue where id = any(%s)",
            held,
        )
        assert {tuple(row.values()) for row in rows} == {("pending", 1, 0, True)}


def hold_one(site: Site, slow: Receiver) -> tuple[int, WorkerSession]:
    """A message in flight, and the worker that held it and was terminated."""
    # Not even its lease ends by itself.
    site.configure(lease_seconds=LEASE)
    site.http("slow", slow.url, {"backoff": "fixed", "base_delay_seconds": 3600}, timeout=LONGEST_TIMEOUT)
    worker = site.start(1)
    id = site.send("slow")
    slow.wait_for(1)
    site.db.execute("select pg_terminate_backend(%s)", [worker.pid])
    wait_until_gone(worker.pid, site.db)
    assert site.status(id) == "processing"
    return id, worker


def test_what_a_terminated_worker_held_is_taken_back_by_the_one_that_takes_its_place(site: Site) -> None:
    with Held() as slow:
        id, worker = hold_one(site, slow.receiver)

        other = site.start(1)

        message = site.message(id)
        assert message["status"] == "pending"
        assert message["last_error"] == f'[RETRYABLE] the session of worker "worker 1, pid {worker.pid}" ended'
        # The way of any failure: its backoff first.
        assert message["next_retry_at"] == message["updated_at"] + timedelta(hours=1)
        slow.release()
        site.db.execute("select ulak.reschedule(%s, now())", [id])
        message = site.wait_for_status(id, "completed")
        assert (message["attempts"], message["retry_count"]) == (2, 1)
        assert [request.headers["ulak-attempt"] for request in slow.receiver.requests] == ["1", "2"]
        assert not other.call.is_done()


def test_a_sweep_takes_back_what_a_terminated_worker_held(site: Site) -> None:
    with Held() as slow:
        id, _ = hold_one(site, slow.receiver)

        site.db.execute("select ulak_private.sweep()")

        assert site.status(id) == "pending"


@pytest.mark.parametrize("change", ["host = 'elsewhere'", "timeline = 0", "timeline = null"])
def test_the_lease_decides_where_the_server_can_not_know_that_a_worker_is_dead(site: Site, change: str) -> None:
    """A node lives on without its session, and this server knows nothing about a worker of another server."""
    with Held() as slow:
        id, _ = hold_one(site, slow.receiver)
        site.db.execute(f"update ulak.workers set {change}")

        site.db.execute("select ulak_private.sweep()")
        assert site.status(id) == "processing"
        site.start(1)
        assert site.status(id) == "processing"

        assert site.value("select ulak.recover_stale_messages(clock_timestamp() + %s * interval '1 s')", LEASE) == 1


def test_a_worker_that_comes_after_stop_was_called_stays_whatever_the_clock_said_then(site: Site) -> None:
    site.start(1).end()
    site.db.execute("update ulak.workers set stop_requested_at = now() + interval '1 hour'")

    worker = site.start(1)

    assert site.worker_row(worker)["stop_requested_at"] is None


def test_a_waiting_worker_holds_no_snapshot(site: Site) -> None:
    query = "select coalesce(backend_xmin::text::bigint, %s) >= %s from pg_stat_activity where pid = %s"
    with Hostile(never_answers) as hanging:
        site.http("hanging", hanging.url, timeout=LONGEST_TIMEOUT)
        worker = site.start()
        site.send_many(200, "hanging")
        wait_until(lambda: site.value(HELD) > 0)

        now = site.value("select pg_current_xact_id()::text::bigint")

        assert wait_until(lambda: site.value(query, now, now, worker.pid))
