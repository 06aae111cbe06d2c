"""start() and stop() with a real pg_cron: what they find, what they schedule, and that messages flow over the minute."""

from __future__ import annotations

from datetime import timedelta
from getpass import getuser

from support.rehearsal import JOBS, Rehearsal, Traffic
from support.sessions import wait_until


def test_start_says_that_pg_cron_is_not_loaded(rehearsal: Rehearsal) -> None:
    problem = rehearsal.problem("not loaded", "pg_cron")

    assert problem["detail"] == "it is not loaded"
    assert problem["fix"] == rehearsal.command
    assert rehearsal.reports["not loaded"][-1]["status"] == "not done"


def test_start_says_that_pg_cron_is_not_created(rehearsal: Rehearsal) -> None:
    problem = rehearsal.problem("not created", "pg_cron")

    assert (problem["detail"], problem["fix"]) == ("it is loaded, but not created", "create extension pg_cron;")


def test_start_finds_limits_that_would_hold_jobs_up(rehearsal: Rehearsal) -> None:
    details = {row["item"]: row["detail"] for row in rehearsal.reports["limits"] if row["status"] == "problem"}

    waits = details.get("mode", "").startswith("pg_cron 1.4 makes every job wait for the longest one")
    assert waits == rehearsal.cluster.cron_waits_for_the_longest_job()
    # Only pg_cron 1.4 needs a watcher.
    workers, others = (3, 4) if waits else (4, 3)
    assert details["max_running_jobs"] == f"{workers} workers and {others} other jobs need 7, it is 4"
    # Where jobs log in they need none.
    assert waits or details["max_worker_processes"] == "7 jobs and 2 other processes need 9, it is 8"
    assert {row["fix"] for row in rehearsal.reports["limits"] if row["status"] == "problem"} == {
        f"{rehearsal.command} --workers {workers}"
    }
    assert "cron.max_running_jobs = '7'" in rehearsal.said["limits"]
    assert rehearsal.jobs["limits"] == []


def test_stop_lets_a_busy_worker_leave_before_pg_cron_ends_its_run(rehearsal: Rehearsal) -> None:
    """Which it does to a background worker whose job is unscheduled."""
    assert rehearsal.reports["a busy worker"] == [{"state": "stopped", "status": "pending", "retry_count": 0}] * 3


def test_start_tries_the_login_that_pg_cron_will_make(rehearsal: Rehearsal) -> None:
    rejected = rehearsal.problem("no entry", "login")
    forbidden = rehearsal.problem("no login", "login")

    assert "pg_hba.conf rejects connection" in rejected["detail"]
    assert rejected["fix"] == rehearsal.command
    assert 'role "ulak_worker" is not permitted to log in' in forbidden["detail"]
    assert forbidden["fix"] == "alter role ulak_worker login;"


def test_the_setup_says_which_line_keeps_a_role_out_and_what_its_map_lacks(rehearsal: Rehearsal) -> None:
    """A line about this role alone stands there on purpose, so it stays."""
    files = [rehearsal.cluster.data / name for name in ("pg_hba.conf", "pg_ident.conf")]
    hba, ident = files
    lacks = (
        f'{ident}: ulak   {getuser()}   ulak_worker   # map "ulak" has no line that lets {getuser()} in as ulak_worker'
    )
    line = f"{hba}: local   shop   ulak_worker   peer map=ulak   # {hba}:2 decides: local all all peer"

    refused = rehearsal.said["no entry"].splitlines()
    assert refused[0] == (
        f"ulak-setup: {hba}:1 says reject, so pg_cron can't log in as ulak_worker: local all ulak_worker reject"
    )
    assert refused[1].startswith("  nothing was changed; above it there has to be: local   shop")
    assert rehearsal.problem("no map", "login")["detail"].endswith('Peer authentication failed for user "ulak_worker"')
    no_map, empty_map = (
        [each.strip() for each in rehearsal.said[name].splitlines() if str(rehearsal.cluster.data) in each]
        for name in ("no map", "empty map")
    )
    assert no_map == [line, lacks]
    assert empty_map == [lacks]


def test_start_brings_jobs_along_that_were_made_on_another_server(rehearsal: Rehearsal) -> None:
    """As a promoted standby finds them; so does maintenance, where it runs by other means."""
    moved = "update cron.job set nodename = '/elsewhere', nodeport = 1 where jobname like 'ulak %'"
    with rehearsal.cluster.connect("shop") as db, db.transaction(force_rollback=True):
        db.execute("select ulak.create_endpoint('to warn about', 'http', '{\"url\": \"https://example.com/\"}')")
        right = db.execute("select jobid, nodename, nodeport from cron.job order by 1").fetchall()
        db.execute(moved)
        finding = db.execute(
            """select severity, finding, fix from ulak.doctor() where "check" = 'pg_cron'"""
        ).fetchall()
        report = db.execute("select detail from ulak.start() where item = 'ulak worker 1 in shop'").fetchone()
        by_start = db.execute("select jobid, nodename, nodeport from cron.job order by 1").fetchall()
        db.execute(moved)
        rows = db.execute(
            "select w.rows from ulak_private.maintenance_work('schedule', null, null, now()) w"
        ).fetchone()
        by_maintenance = db.execute("select jobid, nodename, nodeport from cron.job order by 1").fetchall()

    jobs = len(rehearsal.wanted_jobs(2))
    assert finding == [
        (
            finding[0][0],
            f"{jobs} jobs run on /elsewhere:1, which is not this server: it was promoted, restored or moved",
            "select * from ulak.start();",
        )
    ]
    assert report is not None and report[0].endswith("(it ran on /elsewhere:1)")
    assert rows == (jobs,)
    assert by_start == by_maintenance == right


def test_another_roles_job_of_the_same_name_is_no_obstacle(rehearsal: Rehearsal) -> None:
    with rehearsal.cluster.connect("shop") as db, db.transaction(force_rollback=True):
        db.execute("grant usage on schema cron to nobody")
        db.execute("set local role nobody")
        db.execute("select cron.schedule('ulak worker 1 in shop', '* * * * *', 'select 1')")
        db.execute("reset role")
        db.execute("select ulak.start()")

        jobs = db.execute("select username from cron.job where jobname = 'ulak worker 1 in shop'").fetchall()

    assert jobs == [("ulak_worker",)]


def test_start_lifts_a_timeout_of_the_database_that_would_end_every_run(rehearsal: Rehearsal) -> None:
    """All runs of these tests are under one of 20 s."""
    by_start = {
        name: [row["status"] for row in rehearsal.reports[name] if row["item"] == "statement_timeout"]
        for name in ("three", "three again")
    }

    assert by_start == {"three": ["done"], "three again": ["unchanged"]}
    assert rehearsal.ask("select ulak_private.run_timeout() as timeout") == [{"timeout": None}]


def test_start_schedules_workers_and_what_keeps_the_house(rehearsal: Rehearsal) -> None:
    report = {row["item"]: row["status"] for row in rehearsal.reports["three"]}

    assert [row[:1] + row[2:] for row in rehearsal.jobs["three"]] == [
        (f"ulak {what} in shop", "postgres" if what in ("log", "vacuum") else "ulak_worker", "shop")
        for what in rehearsal.wanted_jobs(3)
    ]
    assert {report[name] for name, *_ in rehearsal.jobs["three"]} == {"done"}
    assert {report[item] for item in ("plpython3u", "pycurl", "pg_cron", "mode", "login")} == {"ok"}


def test_repeating_start_changes_nothing_and_another_number_rescales(rehearsal: Rehearsal) -> None:
    again = {row["item"]: row["status"] for row in rehearsal.reports["three again"]}
    fewer = {row["item"]: row["detail"] for row in rehearsal.reports["two"]}

    assert rehearsal.jobs["three again"] == rehearsal.jobs["three"]
    assert {again[name] for name, *_ in rehearsal.jobs["three"]} == {"unchanged"}
    assert fewer["ulak worker 3 in shop"] == "unscheduled"
    assert [name for name, *_ in rehearsal.jobs["two"]] == [f"ulak {what} in shop" for what in rehearsal.wanted_jobs(2)]


def test_repeating_start_tells_pg_cron_of_its_jobs_again(rehearsal: Rehearsal) -> None:
    """It may have missed the first time."""
    told = "select count(*) from cron.job where xmin::text::bigint = pg_current_xact_id()::text::bigint % 4294967296"
    with rehearsal.cluster.connect("shop") as db, db.transaction(force_rollback=True):
        db.execute("select ulak.start()")

        assert db.execute(told).fetchone() == (len(rehearsal.wanted_jobs(2)),)


def test_start_says_what_to_run_where_pg_cron_lives(rehearsal: Rehearsal) -> None:
    (todo,) = [row for row in rehearsal.reports["elsewhere"] if row["item"] == "schedule"]
    watcher = r" \\ select ulak_private.launch_watcher();" if rehearsal.cluster.cron_waits_for_the_longest_job() else ""
    commands = r"select ulak_private.commands_elsewhere({}) as ulak \gset \c shop \\ :ulak \c other".format
    unschedule = rehearsal.ask("select * from ulak.stop()", "other")[0]["fix"]
    with rehearsal.cluster.connect("shop") as db, db.transaction(force_rollback=True):
        before = db.execute(JOBS).fetchall()
        db.execute(rehearsal.ask("select ulak_private.commands_elsewhere(2) as them", "other")[0]["them"])
        scheduled = [row for row in db.execute(JOBS).fetchall() if row not in before]
        db.execute(rehearsal.ask("select ulak_private.commands_elsewhere(null) as them", "other")[0]["them"])
        after = db.execute(JOBS).fetchall()

    assert (todo["status"], todo["fix"], unschedule) == ("to do", commands(2) + watcher, commands("null"))
    assert [(name, database) for name, _, _, database in scheduled] == [
        (f"ulak {what} in other", "shop" if what == "log" else "other") for what in rehearsal.wanted_jobs(2)
    ]
    assert after == before


def test_start_does_not_trust_a_schema_that_is_not_pg_crons(rehearsal: Rehearsal) -> None:
    with rehearsal.cluster.connect("other") as db, db.transaction(force_rollback=True):
        db.execute("create schema cron create table job (jobid bigint, jobname text)")

        (row,) = db.execute("select status from ulak.start() where item = 'schedule'").fetchall()

    assert row == ("to do",)


def test_messages_flow_over_the_minute(rehearsal: Rehearsal, traffic: Traffic) -> None:
    """The only test that waits for the clock: pg_cron starts its jobs with the minute."""
    runs = """
        select status, start_time, date_trunc('minute', start_time) as minute, end_time, date_trunc('minute', end_time) as end_minute
        from cron.job_run_details where command = 'call ulak.run_worker({}, p_is_scheduled => true)' and start_time is not null order by runid
    """

    # Each is a minute away at most.
    for count in (1, 2):
        for slot in (1, 2):
            wait_until(lambda: len(rehearsal.ask(runs.format(slot))) >= count, f"run {count} of worker {slot}")  # noqa: B023
    arrived = len(traffic.receiver.requests)
    traffic.receiver.wait_for(arrived + 50)
    traffic.end()
    left = "select count(*) as n from ulak.messages where status <> 'completed'"
    wait_until(lambda: rehearsal.ask(left)[0]["n"] == 0)

    for slot in (1, 2):
        first, second, *_ = rehearsal.ask(runs.format(slot))
        assert first["status"] == "succeeded"
        # It ends just after the minute, when pg_cron has queued the next one, and that one starts at once.
        assert first["end_minute"] == second["minute"] == first["minute"] + timedelta(minutes=1)
        assert first["end_time"] <= second["start_time"]
    # No run gave anything back.
    assert rehearsal.ask("select max(attempts) as attempts from ulak.messages") == [{"attempts": 1}]
    others = "select distinct command, status from cron.job_run_details where command !~ 'workers?\\(' and end_time is not null"
    assert {row["status"] for row in rehearsal.ask(others)} == {"succeeded"}
    assert len(rehearsal.ask(others)) == 3


PIDS = "select slot, pid from ulak.get_worker_status() where state = 'running' order by slot"


def test_workers_that_were_terminated_come_back_without_waiting_for_the_minute(
    rehearsal: Rehearsal, traffic: Traffic
) -> None:
    """All at once, and again. The minute may come meanwhile: then it doesn't count."""
    gone: set[int] = set()
    # Later versions of pg_cron need no minute to start them.
    by_the_minute = "select from cron.job_run_details where job_pid = any (array{}) and end_time is null"
    has_minutes = rehearsal.cluster.cron_waits_for_the_longest_job()

    def others() -> list[int]:
        # A look that began before the next one came may still name the one before.
        pids = [row["pid"] for row in rehearsal.ask(PIDS)]
        return pids if len(pids) == 2 and gone.isdisjoint(pids) else []

    def come_back() -> bool:
        pids = wait_until(others, "two workers")
        rehearsal.ask(f"select pg_terminate_backend(pid) from unnest(array{pids}) pid")
        gone.update(pids)
        newcomers = wait_until(others, "two other workers")
        return not (has_minutes and rehearsal.ask(by_the_minute.format(newcomers)))

    for _ in range(2):
        wait_until(come_back, "workers that didn't wait for the minute")
    # A run that finds its slot taken ends at once.
    sessions = "select count(*) as n from pg_stat_activity where usename = 'ulak_worker'"
    wait_until(lambda: rehearsal.ask(sessions)[0]["n"] <= 3, "no more than two workers and their watcher")


def test_workers_bring_back_their_watcher(rehearsal: Rehearsal, traffic: Traffic) -> None:
    """Any one of them brings back the others. Later versions of pg_cron need no watcher."""
    if not rehearsal.cluster.cron_waits_for_the_longest_job():
        return
    watchers = "select pid from ulak_private.watchers()"
    (watcher,) = wait_until(lambda: rehearsal.ask(watchers), "a watcher")

    rehearsal.ask(f"select pg_terminate_backend({watcher['pid']})")

    others = f"{watchers} where pid <> {watcher['pid']}"
    wait_until(lambda: rehearsal.ask(others), "another watcher")


def test_a_database_can_be_dropped_while_workers_run(rehearsal: Rehearsal, traffic: Traffic) -> None:
    """Not only at the next minute: pg_cron 1.4 has to be made to answer. The watcher updates no row of its table, so that it reads it."""
    with rehearsal.cluster.connect("shop") as db:
        db.execute("set statement_timeout = 0")
        db.execute("""
            create sequence made_to_answer;
            create function note() returns trigger language plpgsql as $$
            begin
                if not exists (select from updated) then
                    perform nextval('public.made_to_answer');
                end if;
                return null;
            end $$;
            create trigger note after update on cron.job referencing new table as updated for each statement execute function note()
        """)

        def is_dropped() -> bool:
            db.execute("create database dropped")
            db.execute("drop database dropped")
            # If the minute has come in between, pg_cron has answered by itself.
            has_minutes = rehearsal.cluster.cron_waits_for_the_longest_job()
            return not has_minutes or db.execute("select is_called from made_to_answer").fetchone() == (True,)

        try:
            wait_until(is_dropped, "a database that was dropped before the next minute")
        finally:
            db.execute("drop function note() cascade; drop sequence made_to_answer")


def test_stop_unschedules_and_workers_leave(rehearsal: Rehearsal, traffic: Traffic) -> None:
    alive = "select count(*) as n from ulak.workers where state = 'running'"
    with rehearsal.cluster.connect("shop") as db:

        def stop() -> tuple[list[str], list[tuple[str, str]]] | None:
            """With two workers. While their rows are locked, the minute ends neither."""
            with db.transaction():
                running = db.execute("select name from ulak.workers where state = 'running' for update").fetchall()
                if len(running) < 2:
                    return None
                return [name for (name,) in running], db.execute("select item, detail from ulak.stop()").fetchall()

        workers, report = wait_until(stop, "two workers") or ([], [])

    assert sum(detail == "unscheduled" for _, detail in report) == len(rehearsal.wanted_jobs(2))
    assert sorted(item for item, detail in report if detail == "asked to leave") == sorted(workers)
    assert rehearsal.ask(JOBS) == []
    wait_until(lambda: rehearsal.ask(alive)[0]["n"] == 0)


def test_the_log_of_pg_cron_is_kept_short(rehearsal: Rehearsal) -> None:
    """Also of jobs that are gone, and of runs that never started."""
    with rehearsal.cluster.connect("shop") as db, db.transaction(force_rollback=True):
        db.execute("delete from cron.job_run_details")
        db.execute("select ulak.start()")
        # pg_cron may write, too, with smaller numbers.
        db.execute("""
            insert into cron.job_run_details (jobid, runid, command, status, start_time)
            select j.jobid, 1000001, j.command, 'failed', null from cron.job j where j.jobname like 'ulak worker 1%'
            union all
            select j.jobid, 1000002, j.command, 'succeeded', now() - interval '2 h' from cron.job j where j.jobname like 'ulak vac%'
            union all values
                (1000, 1000003, 'call ulak.run_worker(3)', 'succeeded', now() - interval '2 h'),
                (1001, 1000004, 'select of_somebody_else()', 'succeeded', now() - interval '2 h'),
                (1002, 1000005, 'call ulak.run_worker(4)', 'running', now())
        """)
        (command,) = db.execute("select command from cron.job where jobname like 'ulak log%'").fetchone() or [""]

        db.execute(command)

        left = db.execute("select runid from cron.job_run_details where runid > 1000000 order by 1").fetchall()
        assert left == [(1000004,), (1000005,)]
