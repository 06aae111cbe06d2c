"""doctor(): each finding is produced for real, and its fix is run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Cluster, Connect, Settings, run
from support.fixes import setup_command
from support.plain import create_cluster
from support.queue import Queue
from support.sessions import Running, wait_until, wait_until_blocked
from support.standby import Standby
from support.statistics import add_worker

DB = psycopg.Connection[Any]

HTTP = {"url": "https://shop.internal/hook"}
SIGNED = {"signing_secret": "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXh5eg=="}


def findings(queue: Queue, check: str, now: float = 0) -> list[dict[str, Any]]:
    query = 'select severity, finding, fix from ulak.doctor(%s) where "check" = %s'
    rows = queue.rows(query, queue.at(now), check)
    # Something to paste, whatever the finding is.
    assert not any("\n" in row["finding"] + (row["fix"] or "") for row in rows)
    return rows


def found(queue: Queue, check: str, now: float = 0) -> dict[str, Any]:
    """The only finding of a check."""
    (finding,) = findings(queue, check, now)
    return finding


def mend(queue: Queue, finding: dict[str, Any]) -> None:
    queue.db.execute(finding["fix"])


def test_a_fresh_installation_lacks_an_endpoint_alone(db: DB) -> None:
    rows = Queue(db).rows("select * from ulak.doctor()")

    # Test clusters run without fsync.
    assert [(row["severity"], row["check"]) for row in rows] == [("critical", "settings"), ("info", "endpoints")]
    assert rows[0]["finding"].startswith("fsync is off")
    assert rows[0]["fix"] == "alter system set fsync = on; -- then: select pg_reload_conf();"


def test_without_an_endpoint_doctor_says_what_to_do_first(queue: Queue) -> None:
    finding = found(queue, "endpoints")
    mend(queue, finding)

    assert (finding["severity"], finding["finding"]) == ("info", "there is no endpoint yet: nothing can be sent")
    assert findings(queue, "endpoints") == []


def test_every_fix_is_run_by_gexec(cluster: Cluster, database: str) -> None:
    with cluster.connect(database) as db:
        queue = Queue(db)
        queue.endpoint("it's", {**HTTP, "circuit_breaker": {"threshold": 1}}, protocol="http")
        queue.send("it's")
        queue.fail(queue.claim_one(endpoint="it's"), "[RETRYABLE] HTTP 503")
        queue.call("disable_endpoint", "it's")
    psql = [cluster.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", cluster.dsn(database)]

    run(psql, input="select fix from ulak.doctor() where \"check\" in ('disabled', 'maintenance') \\gexec\n")

    with cluster.connect(database) as db:
        told = Queue(db).column('select "check" from ulak.doctor()')
    assert not {"disabled", "maintenance"} & set(told)


def test_the_worst_comes_first(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "https://example.com/hook"}, protocol="http")
    queue.send()
    queue.call("disable_endpoint", "shop")

    severities = queue.column("select severity from ulak.doctor()")

    assert severities == sorted(severities, key=["critical", "warning", "info"].index)
    assert set(severities) == {"critical", "warning", "info"}


def test_a_cause_comes_before_what_follows_from_it(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    queue.send()

    checks = queue.column("""select "check" from ulak.doctor(%s) where severity = 'critical'""", queue.at(7200))

    assert checks.index("workers") < checks.index("backlog")


# Workers and their scheduler.


def test_no_worker_alive_is_critical(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    assert found(queue, "workers") == {
        "severity": "critical",
        "finding": "no worker is alive",
        "fix": "select * from ulak.start();",
    }

    add_worker(queue)

    assert findings(queue, "workers") == []
    assert found(queue, "workers", now=60)["finding"] == "no worker is alive; the last sign of life was 1m 0s ago"


def test_a_worker_that_went_silent_is_reported_beside_one_that_works(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    add_worker(queue, 1, heartbeat=-30)
    add_worker(queue, 2)

    finding = found(queue, "workers")

    assert (finding["severity"], finding["finding"]) == ("warning", "worker 1 went silent 30.0s ago")


def test_pull_endpoints_need_no_worker(queue: Queue) -> None:
    queue.endpoint()

    assert findings(queue, "workers") == []


def test_jobs_that_can_not_run_are_distinguished_from_missing_ones(cluster: Cluster, cron_database: str) -> None:
    with cluster.connect(cron_database) as db:
        queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
        queue.endpoint("shop", HTTP, protocol="http")
        assert found(queue, "workers")["finding"] == "no worker is alive, and pg_cron has no job for one"

        db.execute("select cron.schedule('ulak worker 1 in ' || current_database(), '* * * * *', 'select 1/0')")

        finding = found(queue, "workers")
        assert finding["finding"].startswith("no worker is alive, though pg_cron has jobs for them")
        mend(queue, finding)


def test_a_worker_that_will_not_be_started_again_is_reported(cluster: Cluster, cron_database: str) -> None:
    with cluster.connect(cron_database) as db, cluster.connect(cron_database) as runner:
        queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
        queue.endpoint("shop", HTTP, protocol="http")
        running = Running(lambda: runner.execute("call ulak.run_worker(1, 0.5)"))
        wait_until(lambda: queue.value("select count(*) from ulak.workers"))

        finding = found(queue, "workers")
        mend(queue, finding)

        assert finding["severity"] == "warning"
        assert finding["finding"] == "workers run, but pg_cron has no job that will start the next ones"
        assert findings(queue, "workers") == []
        running.result()


def test_workers_that_start_has_just_asked_for_are_not_missed_yet(cluster: Cluster, cron_database: str) -> None:
    with cluster.connect(cron_database) as db, db.transaction(force_rollback=True):
        queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
        queue.endpoint("shop", HTTP, protocol="http")
        message = queue.send()
        assert found(queue, "workers", now=1)["severity"] == "critical"

        (told,) = queue.rows("select * from ulak.start() where item = 'workers'")

        assert told["status"] == "ok"
        assert told["detail"] == "2 workers: they begin within a few seconds after this transaction commits"
        finding = found(queue, "workers", now=1)
        assert finding["severity"] == "info"
        assert finding["finding"].startswith("no worker is alive yet: start() was called ")
        story = queue.column("select what from ulak.explain(%s, %s)", message, queue.at(1))
        assert story[-1].startswith("next: a worker takes it; start() was called, and workers start ")
        (health,) = queue.rows("select * from ulak.health_check(%s) where component = 'workers'", queue.at(1))
        assert (health["status"], health["details"][:22]) == ("ok", "0 alive; no worker is ")
        # Those that never come are missed.
        assert found(queue, "workers", now=100)["severity"] == "critical"
        # And one that came and was killed, at once: its row is young, but no process has its pid.
        add_worker(queue, heartbeat=12)
        db.execute("update ulak.workers set pid = 1, started_at = now() + interval '2 s'")
        finding = found(queue, "workers", now=12)
        assert finding["severity"] == "critical"
        assert finding["finding"].startswith("no worker is alive; the next one starts ")


SETUP = "the command of ulak-setup"


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[Cluster]:
    """One whose settings these tests change."""
    settings: Settings = {"shared_preload_libraries": "", "max_prepared_transactions": 2}
    cluster = create_cluster(settings=settings, in_memory=True)
    cluster.install(cluster.create_database("app"))
    with cluster.connect("app") as db:
        Queue(db).endpoint("shop", HTTP, protocol="http")
    yield cluster
    cluster.remove()


@pytest.mark.parametrize(
    ("settings", "check", "finding", "fix"),
    [
        (
            {"shared_preload_libraries": "auto_explain"},
            "pg_cron",
            "it is not loaded",
            SETUP,
        ),
        (
            {"shared_preload_libraries": "pg_cron", "cron.database_name": "nowhere"},
            "cron.database_name",
            'pg_cron looks for its jobs in database "nowhere", which does not exist',
            SETUP,
        ),
        ({"cron.database_name": "app"}, "pg_cron", "it is loaded, but not created", "create extension pg_cron;"),
        (
            {"cron.database_name": "postgres", "cron.use_background_workers": True, "cron.max_running_jobs": 2},
            "mode",
            "pg_cron 1.4 makes every job wait for the longest one",
            SETUP,
        ),
        (
            {},
            "max_running_jobs",
            "2 workers and {others} other jobs need {needed}, it is 2",
            SETUP,
        ),
    ],
    ids=["missing", "stopped", "not created", "wrong mode", "too few jobs"],
)
def test_a_pg_cron_that_can_not_serve_is_critical(
    other_cluster: Cluster, settings: dict[str, Any], check: str, finding: str, fix: str
) -> None:
    if settings:
        other_cluster.configure(settings)
        other_cluster.restart()
    with other_cluster.connect("app") as db:
        queue = Queue(db)
        if check == "mode" and not other_cluster.cron_waits_for_the_longest_job():
            assert findings(queue, check) == []
            return

        # Only pg_cron 1.4 needs a watcher.
        others = 4 if other_cluster.cron_waits_for_the_longest_job() else 3

        told = found(queue, check)

        assert told["severity"] == "critical"
        assert told["finding"].startswith(finding.format(others=others, needed=2 + others))
        assert told["fix"] == (setup_command(other_cluster, "app") if fix is SETUP else fix)
        db.execute(told["fix"])


@pytest.fixture
def busy_cluster() -> Iterator[Cluster]:
    """pg_cron runs a job that takes its time, and lives elsewhere than ulak."""
    cluster = Cluster.create(in_memory=True)
    for name in ("app", "unwanted"):
        cluster.create_database(name)
    cluster.install("app")
    cluster.execute("create extension pg_cron")
    cluster.execute("select cron.schedule('long', '@reboot', 'select pg_sleep(600)')")
    cluster.restart()
    yield cluster
    cluster.remove()


def test_a_session_that_waits_for_pg_cron_is_reported(busy_cluster: Cluster) -> None:
    if not busy_cluster.cron_waits_for_the_longest_job():
        pytest.skip("this pg_cron answers while jobs run")
    with busy_cluster.connect("app") as db, busy_cluster.connect() as owner, busy_cluster.connect() as other:
        queue = Queue(db)
        queue.endpoint("shop", HTTP, protocol="http")
        query = "select count(*) > 0 from pg_stat_activity where query = 'select pg_sleep(600)'"
        wait_until(lambda: other.execute(query).fetchone() == (True,), "the job")

        dropping = Running(lambda: owner.execute("drop database unwanted"))
        query = """select * from ulak.doctor() where "check" = 'pg_cron' and finding like 'session %%'"""
        (told,) = wait_until(lambda: queue.rows(query), message="the finding")

        assert told["severity"] == "warning"
        pid = owner.info.backend_pid
        assert told["finding"].startswith(
            f"session {pid} waits for pg_cron, which answers at the next full minute: drop database"
        )
        statement = "update cron.job set active = active where false;"
        assert told["fix"] == rf"select $${statement}$$ as ulak \gset \c postgres \\ :ulak \c app"
        other.execute(statement)
        dropping.result()


CLIENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "amqp": ("pika", "python3-pika", {"host": "rabbit", "exchange": "orders"}),
    "http": (
        "cryptography",
        "python3-cryptography",
        {"url": "https://example.com", "signing_secret": "whsk_" + "A" * 43 + "="},
    ),
    "kafka": ("librdkafka.so.1", "librdkafka1", {"broker": "kafka:9092", "topic": "orders"}),
    "mqtt": ("paho", "python3-paho-mqtt", {"broker": "mqtt", "topic": "orders"}),
    "nats": (
        "cryptography",
        "python3-cryptography",
        {"url": "nats", "subject": "orders", "credentials_file": "/a.creds"},
    ),
    "redis": ("redis", "python3-redis", {"host": "cache.internal", "stream_key": "orders"}),
}


def test_a_client_library_that_is_missing_is_reported(db: DB) -> None:
    queue = Queue(db)
    # It needs no client.
    queue.endpoint("plain", {"url": "nats", "subject": "orders"}, protocol="nats")
    queue.endpoint("hmac", {"url": "https://example.com", "signing_secret": "a good secret"}, protocol="http")
    for protocol, (module, _, config) in CLIENTS.items():
        queue.endpoint(protocol, config, protocol=protocol)
        # As if it weren't installed, for this session.
        queue.db.execute(f"do $$ import sys; sys.modules['{module}'] = None $$ language plpython3u")  # type: ignore[arg-type]
    # A shared library; without a name, CDLL() is the C library.
    queue.db.execute(
        "do $$ import ctypes; real = ctypes.CDLL;"
        " ctypes.CDLL = lambda name: open('/nowhere') if name else real(name) $$ language plpython3u"
    )

    told = [each for each in findings(queue, "workers") if "not installed" in each["finding"]]
    started = queue.rows(
        "select item, status, detail, fix from ulak.start() where detail like 'it is not installed%%' order by item, detail"
    )

    packages = sorted((package, protocol) for protocol, (_, package, _) in CLIENTS.items())
    assert sorted(told, key=lambda each: str(each["finding"])) == [
        {
            "severity": "warning",
            "finding": f"{package} is not installed on this server: no worker in the database delivers to the 1 endpoint of protocol {protocol}",
            "fix": f"-- as root on the server: apt-get install {package}",
        }
        for package, protocol in packages
    ]
    assert started == [
        {
            "item": package,
            "status": "warning",
            "detail": f"it is not installed; needed for 1 endpoint of protocol {protocol}",
            "fix": f"-- as root on the server: apt-get install {package}",
        }
        for package, protocol in packages
    ]
    for package, protocol in packages:
        (pong,) = queue.rows("select outcome, error from ulak.ping(%s)", protocol)
        assert pong["outcome"] == "failed"
        assert f"{package} isn't installed where the worker runs, and " in pong["error"]


def test_an_autovacuum_that_is_off_is_reported(other_cluster: Cluster) -> None:
    other_cluster.configure({"autovacuum": False})
    other_cluster.reload()
    with other_cluster.connect("app") as db:
        queue = Queue(db)

        def told() -> list[dict[str, Any]]:
            return [each for each in findings(queue, "settings") if "autovacuum" in each["finding"]]

        (finding,) = wait_until(told)
        mend(queue, finding)
        db.execute("select pg_reload_conf()")

        wait_until(lambda: not told())


# Maintenance.


def test_maintenance_that_never_ran_is_reported_until_it_has(db: DB) -> None:
    queue = Queue(db)
    queue.endpoint()

    finding = found(queue, "maintenance")
    mend(queue, finding)

    assert (finding["severity"], finding["finding"]) == ("warning", "run_maintenance() never ran")
    assert findings(queue, "maintenance", now=-3600) == []
    assert found(queue, "maintenance", now=60)["finding"].startswith("run_maintenance() last ran 1h")


def test_maintenance_that_pg_cron_is_about_to_start_is_not_missed(db: DB) -> None:
    queue = Queue(db)
    queue.endpoint()
    db.execute("insert into ulak_private.schedule (workers, changed_at) values (1, %s)", [queue.at(0)])

    assert findings(queue, "maintenance", now=60) == []
    assert found(queue, "maintenance", now=180)["finding"] == "run_maintenance() never ran"


def test_a_step_that_fails_is_critical_and_says_why(db: DB) -> None:
    queue = Queue(db)
    db.execute("alter function ulak_private.cleanup(text, integer, integer, timestamptz) rename to _cleanup_gone")
    db.execute("call ulak.run_maintenance()")

    finding = found(queue, "maintenance", now=-3600)

    assert finding["severity"] == "critical"
    assert "inbox_retention failed: function ulak_private.cleanup" in finding["finding"]


def test_a_missing_month_is_made(queue: Queue) -> None:
    month = queue.value("select to_char(now() at time zone 'UTC' + interval '1 month', 'YYYY_MM')")
    queue.db.execute(f"drop table ulak_private.archive_{month}")

    finding = found(queue, "partitions")
    mend(queue, finding)

    assert finding["finding"] == f"partition archive_{month} is missing"
    assert findings(queue, "partitions") == []


def test_a_default_partition_is_emptied(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.db.execute(
        "insert into ulak_private.archived (id, endpoint_id, event_id, created_at, status) values (1, %s, 0, '2020-02-03Z', 'completed')",
        [endpoint],
    )

    finding = found(queue, "partitions")
    mend(queue, finding)

    assert finding["finding"].startswith("archive_default is not empty")
    assert findings(queue, "partitions") == []


def test_a_restored_cluster_that_was_not_adopted_is_critical(queue: Queue) -> None:
    queue.db.execute("update ulak_private.cluster_identity set system_identifier = 1")

    finding = found(queue, "cluster")
    mend(queue, finding)

    assert finding["severity"] == "critical"
    assert findings(queue, "cluster") == []


# Dead letters.


def test_a_dead_letter_queue_that_grows_is_reported_with_its_commonest_cause(queue: Queue) -> None:
    queue.endpoint()
    ids = queue.send_many(21)
    for id in ids[:9]:
        queue.bury(id, "HTTP 404")
    assert found(queue, "dlq")["finding"] == '9 dead letters of endpoint "shop" wait for a decision'

    queue.bury(ids[9], "HTTP 422")

    finding = found(queue, "dlq")
    assert finding["finding"] == (
        "the dead-letter queue grows: 10 entered in the last hour, 0 in the hour before; most often: [PERMANENT] HTTP 404"
    )
    mend(queue, finding)
    # No more than before: it doesn't grow.
    for id in ids[10:20]:
        queue.bury(id, "HTTP 404", now=3700)
    assert found(queue, "dlq", now=3700)["finding"] == '20 dead letters of endpoint "shop" wait for a decision'
    queue.bury(ids[20], "HTTP 404", now=3700)
    assert found(queue, "dlq", now=3700)["finding"].startswith("the dead-letter queue grows: 11 ")
    queue.call("redrive_all")
    assert findings(queue, "dlq", now=3700) == []


def test_dead_letters_that_are_about_to_be_deleted_are_reported(queue: Queue) -> None:
    queue.endpoint()
    letter = queue.bury(queue.send())
    later = timedelta(days=28).total_seconds()
    earlier = found(queue, "dlq", now=timedelta(days=26).total_seconds())
    assert earlier["finding"] == '1 dead letter of endpoint "shop" waits for a decision'
    mend(queue, earlier)

    _, finding = findings(queue, "dlq", now=later)
    mend(queue, finding)
    queue.call("redrive_message", letter)

    assert finding["finding"] == (
        'dead letters that nobody has redriven will be deleted in 2d 0h; the oldest is of endpoint "shop"'
    )
    assert findings(queue, "dlq", now=later) == []


@pytest.mark.parametrize("told_by", ["ulak.endpoint.dead_letters", "ulak.message.dead", "ulak.*", "log_dlq"])
def test_dead_letters_that_nobody_is_told_of_are_reported_and_an_installation_without_any_is_left_alone(
    queue: Queue, told_by: str
) -> None:
    queue.endpoint()
    queue.endpoint("pager")
    assert findings(queue, "alerts") == []
    letter = queue.bury(queue.send())
    finding = found(queue, "alerts")
    assert (finding["severity"], finding["finding"].partition(":")[0]) == ("warning", "nobody is told of dead letters")

    if told_by == "log_dlq":
        mend(queue, finding)
    else:
        queue.call("subscribe", told_by, "pager")

    assert findings(queue, "alerts") == []
    queue.call("redrive_message", letter)
    queue.call("configure", "log_dlq", None)
    assert findings(queue, "alerts") == []


# Endpoints.


def test_an_open_circuit_is_reported_at_once_and_critical_after_ten_minutes(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.call("update_circuit_breaker", endpoint, True, now=queue.at(0))
    for _ in range(10):
        queue.call("update_circuit_breaker", endpoint, False, now=queue.at(60))

    finding = found(queue, "circuit", now=60)

    assert finding["severity"] == "warning"
    assert finding["finding"] == (
        'the circuit of endpoint "shop" opened 0.0ms ago: its answers don\'t count as success. 0 messages wait, '
        "the last success was 1m 0s ago: [RETRYABLE] reported"
    )
    # A probe that fails begins a new cooldown, and no new outage.
    queue.send()
    queue.fail(queue.claim_one(now=600), now=601)
    assert found(queue, "circuit", now=659)["severity"] == "warning"
    assert found(queue, "circuit", now=660)["severity"] == "critical"
    assert finding["fix"].startswith("select * from ulak.ping('shop'); -- when it answers again: ")
    queue.db.execute(finding["fix"].split("again: ")[1])
    assert findings(queue, "circuit", now=660) == []


def test_a_message_that_waits_for_a_long_time_is_reported(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(2)
    assert findings(queue, "backlog", now=299) == []

    finding = found(queue, "backlog", now=301)
    mend(queue, finding)

    assert finding["severity"] == "warning"
    assert finding["finding"] == 'the oldest due message for endpoint "shop" has waited for 5m 1s; 2 wait in all'
    assert found(queue, "backlog", now=3601)["severity"] == "critical"


def test_a_disabled_endpoint_that_holds_messages_is_reported(queue: Queue) -> None:
    queue.endpoint()
    queue.send()
    queue.call("disable_endpoint", "shop")

    finding = found(queue, "disabled")
    mend(queue, finding)

    assert (finding["severity"], finding["finding"]) == ("info", 'endpoint "shop" is disabled and holds 1 message')
    assert findings(queue, "disabled") == []


def test_a_queue_that_fills_up_is_reported_with_the_endpoint_that_fills_it(queue: Queue) -> None:
    queue.endpoint()
    queue.endpoint("other")
    queue.endpoint("idle")
    queue.send_many(8)
    queue.send("other")
    queue.call("configure", "max_queue_size", "10")

    finding = found(queue, "queue")
    mend(queue, finding)

    assert (finding["severity"], finding["finding"]) == (
        "warning",
        'the queue holds 9 of at most 10 messages, most of them for "shop" (8), "other" (1)',
    )
    assert findings(queue, "queue") == []


def test_an_endpoint_that_is_full_is_reported(queue: Queue) -> None:
    queue.endpoint("small", {"max_pending": 2})
    queue.send("small")
    assert findings(queue, "queue") == []

    queue.send("small")

    finding = found(queue, "queue")
    mend(queue, finding)
    assert finding["finding"] == 'endpoint "small" is full: 2 messages wait for it, its max_pending is 2'


def test_a_first_message_that_holds_up_its_ordering_key_for_hours_is_reported(queue: Queue) -> None:
    queue.endpoint()
    head = queue.send(scheduled_at=86400, ordering_key="k")
    queue.send(scheduled_at=86400, ordering_key="alone")
    assert findings(queue, "ordering", now=120) == []

    queue.send(ordering_key="k")

    finding = found(queue, "ordering", now=120)
    assert (finding["severity"], finding["finding"]) == (
        "info",
        f'message {head} holds up ordering key "k" for endpoint "shop": it is due in 23h 58m, and others wait behind it',
    )
    assert f"select ulak.reschedule({head}, now())" in finding["fix"]
    assert findings(queue, "ordering", now=86400 - 3600) == []


def test_a_sender_that_waits_for_an_ordering_key_is_reported_with_the_holder(db: DB, connect: Connect) -> None:
    queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
    queue.endpoint()
    queue.send(ordering_key="k")
    holder, waiter = connect(autocommit=False), connect(autocommit=False)
    holder.execute("select ulak.send('shop', '{}', p_ordering_key => 'k')")
    waiting = Running(lambda: waiter.execute("select ulak.send('shop', '{}', p_ordering_key => 'k')"))
    wait_until_blocked(waiter.info.backend_pid, db)
    assert findings(queue, "ordering key") == []

    finding = found(queue, "ordering key", now=60)

    assert finding["finding"].startswith(f"session {holder.info.backend_pid} of ")
    assert "idle in transaction for" in finding["finding"]
    assert 'holds ordering key "k" of endpoint "shop": a sender waits, the first for ' in finding["finding"]
    assert queue.value("select status from ulak.health_check(%s) where component = 'queue'", queue.at(60)) == "warning"
    mend(queue, finding)
    waiting.result()
    assert findings(queue, "ordering key", now=60) == []


def test_a_sender_that_waits_for_a_new_ordering_key_is_reported(db: DB, connect: Connect) -> None:
    queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
    queue.endpoint()
    holder, waiter = connect(autocommit=False), connect(autocommit=False)
    holder.execute("select ulak.send('shop', '{}', p_ordering_key => 'k')")
    waiting = Running(lambda: waiter.execute("select ulak.send('shop', '{}', p_ordering_key => 'k')"))
    wait_until_blocked(waiter.info.backend_pid, db)

    finding = found(queue, "ordering key", now=60)
    mend(queue, finding)
    waiting.result()

    assert "holds an ordering key: a sender waits" in finding["finding"]


def test_a_wait_for_an_applications_own_rows_is_not_ours_to_tell(db: DB, connect: Connect) -> None:
    queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
    queue.endpoint()
    db.execute("create table public.orders as select 1 as id")
    holder, waiter = connect(autocommit=False), connect(autocommit=False)
    for key, session in (("a", holder), ("b", waiter)):
        session.execute("select ulak.send('shop', '{}', p_ordering_key => %s)", [key])
    holder.execute("update public.orders set id = 2")
    waiting = Running(lambda: waiter.execute("update public.orders set id = 3"))
    wait_until_blocked(waiter.info.backend_pid, db)

    assert findings(queue, "ordering key", now=50) == []
    holder.rollback()
    waiting.result()


def test_a_session_that_has_sent_and_is_idle_in_its_transaction_is_reported(db: DB, connect: Connect) -> None:
    queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
    queue.endpoint()
    idle, reader = connect(autocommit=False), connect(autocommit=False)
    idle.execute("select ulak.send('shop', '{}')")
    reader.execute("select count(*) from ulak.queue")
    assert findings(queue, "session", now=50) == []

    finding = found(queue, "session", now=200)
    mend(queue, finding)

    assert finding["finding"].startswith(f"session {idle.info.backend_pid} of ")
    assert " has sent messages and has been idle in its transaction for 3m" in finding["finding"]
    assert "()" not in finding["finding"]
    wait_until(lambda: not findings(queue, "session", now=200))


def test_messages_of_a_dropped_endpoint_are_reported(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.send_many(3)
    queue.db.execute("delete from ulak.endpoints")

    finding = found(queue, "dropped endpoint")
    mend(queue, finding)

    assert finding["finding"] == f"messages wait for endpoint {endpoint}, which does not exist"
    assert findings(queue, "dropped endpoint") == []
    assert queue.value("select count(*) from ulak.dlq") == 3


# Settings and signatures.


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        ("http_allow_internal_urls", "true", "http_allow_internal_urls is on"),
        ("max_queue_size", "0", "max_queue_size is 0"),
        ("default_max_retries", "0", "default_max_retries is 0"),
        ("retry_base_delay", "301", "retry_base_delay is above retry_max_delay"),
        ("poll_interval", "1001", "poll_interval is above a second"),
    ],
)
def test_a_suspicious_setting_is_reported(queue: Queue, name: str, value: str, finding: str) -> None:
    queue.call("configure", name, value)

    def told() -> list[dict[str, Any]]:
        return [each for each in findings(queue, "settings") if each["finding"].startswith(finding)]

    (suspicious,) = told()
    mend(queue, suspicious)

    assert told() == []


def without_effect(queue: Queue) -> list[str]:
    return sorted(each["finding"] for each in findings(queue, "settings") if "has no effect" in each["finding"])


def test_a_parameter_of_the_server_that_has_no_effect_is_reported(queue: Queue) -> None:
    queue.db.execute("set local ulak.batch_size = '7'")
    queue.db.execute("create role somebody")
    queue.db.execute("alter role somebody set ulak.default_max_retries = '3'")
    queue.db.execute("alter role somebody set ulak.Workers_To_Start = '4=5'")
    for parameter in ("accept_roles", "traceparent", "tracestate"):
        queue.db.execute(f"alter role somebody set ulak.{parameter} = 'x'")
    (database,) = queue.db.execute("select quote_ident(current_database())").fetchone() or ()
    queue.db.execute(f"alter database {database} set ulak.poll_interval = '9'")
    queue.db.execute(f"alter role somebody in database {database} set ulak.gone = 'secret'")

    assert without_effect(queue) == [
        "the server's parameter ulak.batch_size (7) has no effect: the setting is 500",
        "the server's parameter ulak.default_max_retries (3) has no effect: the setting is 10",
        "the server's parameter ulak.gone has no effect: there is no setting of that name",
        "the server's parameter ulak.poll_interval (9) has no effect: the setting is 50",
        "the server's parameter ulak.workers_to_start has no effect: there is no setting of that name",
    ]


def test_a_line_of_the_servers_files_that_has_no_effect_is_reported(other_cluster: Cluster) -> None:
    other_cluster.configure({"ulak.batch_size": 7, "ulak.shared_secret": "swordfish"})
    other_cluster.reload()
    with other_cluster.connect("app") as db:
        queue = Queue(db)

        told = wait_until(lambda: without_effect(queue))

    assert told == [
        "the server's parameter ulak.batch_size (7) has no effect: the setting is 500",
        "the server's parameter ulak.shared_secret has no effect: there is no setting of that name",
    ]


@pytest.mark.parametrize(
    ("check", "config", "finding"),
    [
        ("signature", {"url": "https://example.com/x"}, "its requests are not signed"),
        ("signature", {"url": "https://8.8.8.8/x"}, "its requests are not signed"),
        ("signature", {"url": "https://example.com/x", "signing_secret": "short-one"}, "a short secret of 9 bytes"),
        (
            "signature",
            {"url": "https://example.com/x", "signing_secret": "whsec_c2VjcmV0LXNlY3JldC0xNg=="},
            "a short secret of 16 bytes",
        ),
        ("transport", {"url": "http://example.com/x", **SIGNED}, "reached without TLS"),
        (
            "transport",
            {"url": "https://example.com/x", "ssl_verify": False, **SIGNED},
            "its certificate is not verified",
        ),
    ],
)
def test_a_public_endpoint_that_is_weakly_protected_is_reported(
    queue: Queue, check: str, config: dict[str, Any], finding: str
) -> None:
    queue.endpoint("shop", config, protocol="http")

    told = found(queue, check)
    mend(queue, told)

    assert finding in told["finding"]
    assert findings(queue, check) == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "billing",
        "db.internal",
        "10.1.2.3",
        "172.20.0.1",
        "192.168.1.1",
        "[::1]",
        "[fd00::1]",
        "127.0.0.1:80",
    ],
)
def test_an_internal_endpoint_is_left_alone(queue: Queue, host: str) -> None:
    queue.endpoint("shop", {"url": f"http://{host}/x"}, protocol="http")

    assert findings(queue, "signature") + findings(queue, "transport") == []


def test_no_finding_gives_a_secret_away(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "http://example.com/x", "signing_secret": "hunter2-2"}, protocol="http")

    assert "hunter2" not in str(queue.rows("select * from ulak.doctor()"))


# Vacuum, and what holds it back.


@pytest.fixture
def littered(db: DB) -> Queue:
    return to_be_littered(db)


def to_be_littered(db: DB) -> Queue:
    """A queue that can be littered with dead rows, and that autovacuum leaves alone."""
    queue = Queue(db, base=db.execute("select now()").fetchone()[0])  # type: ignore[index]
    db.execute("alter table ulak_private.deliveries set (autovacuum_enabled = off)")
    queue.endpoint()
    db.execute(
        "insert into ulak_private.deliveries (endpoint_id, event_id) select id, 0 from ulak.endpoints, generate_series(1, 5001)"
    )
    return queue


def litter(queue: Queue) -> None:
    for _ in range(2):
        queue.db.execute("update ulak.queue set updated_at = now()")
    queue.db.execute("select pg_stat_force_next_flush()")


def held_back(queue: Queue, by: str) -> dict[str, Any]:
    """The finding that names the culprit, some minutes later and after a vacuum that couldn't do its work."""
    litter(queue)
    queue.db.execute("vacuum ulak_private.deliveries")

    def told() -> list[dict[str, Any]]:
        return [each for each in findings(queue, "vacuum", now=120) if by in each["finding"]]

    (finding,) = wait_until(told, message=by)
    assert finding["finding"].startswith("10,002 dead rows of ulak.queue are held back by ")
    return finding


def is_free(queue: Queue) -> bool:
    queue.db.execute("vacuum ulak_private.deliveries")
    return findings(queue, "vacuum", now=120) == []


def test_dead_rows_without_a_vacuum_are_reported(littered: Queue) -> None:
    litter(littered)

    finding = wait_until(lambda: findings(littered, "vacuum"))[0]
    mend(littered, finding)

    assert finding["finding"] == "10,002 dead rows of ulak.queue were not vacuumed; the last vacuum is not known"
    assert findings(littered, "vacuum") == []


def test_a_session_that_holds_vacuum_back_is_named(littered: Queue, connect: Connect) -> None:
    idler = connect("ulak_application", autocommit=False)
    idler.execute("set application_name = 'nightly report'")
    idler.execute("set transaction isolation level repeatable read")
    idler.execute("select 1")
    pid = idler.info.backend_pid

    finding = held_back(littered, f"session {pid} of test_ulak_application (nightly report), idle in transaction")
    mend(littered, finding)

    assert finding["fix"] == f"select pg_terminate_backend({pid});"
    wait_until(lambda: is_free(littered))


def test_a_session_is_reported_after_an_hour_even_if_nothing_is_dead_yet(littered: Queue, connect: Connect) -> None:
    idler = connect(autocommit=False)
    idler.execute("set transaction isolation level repeatable read")
    idler.execute("select 1")
    assert findings(littered, "vacuum", now=3000) == []

    (finding,) = findings(littered, "vacuum", now=3700)

    assert finding["finding"].startswith(f"vacuum will be held back by session {idler.info.backend_pid} ")


def test_a_prepared_transaction_that_holds_vacuum_back_is_named(other_cluster: Cluster) -> None:
    other_cluster.install(other_cluster.create_database("two_phases"))
    with other_cluster.connect("two_phases") as db, other_cluster.connect("two_phases") as session:
        littered = to_be_littered(db)
        session.execute("begin")
        session.execute("create table forgotten ()")
        session.execute("prepare transaction 'two phases'")

        finding = held_back(littered, 'prepared transaction "two phases" of postgres')
        mend(littered, finding)

        assert finding["fix"].startswith("rollback prepared 'two phases';")
        wait_until(lambda: is_free(littered))


def oldest_transaction(queue: Queue) -> int:
    return int(queue.value("select pg_current_xact_id()::text"))


def test_a_standby_that_holds_vacuum_back_is_named(littered: Queue, cluster: Cluster) -> None:
    with Standby(cluster.dsn(), "reader") as standby:
        standby.hold(oldest_transaction(littered))
        wait_until(lambda: littered.value("select backend_xmin is not null from pg_stat_replication"))

        finding = held_back(littered, 'standby "reader" at local, by hot_standby_feedback')
        mend(littered, finding)

        wait_until(lambda: is_free(littered))


def test_a_replication_slot_that_holds_vacuum_back_is_named(littered: Queue, cluster: Cluster) -> None:
    littered.db.execute("select pg_create_physical_replication_slot('left_behind')")
    with Standby(cluster.dsn(), "reader", "left_behind") as standby:
        standby.hold(oldest_transaction(littered))
        wait_until(lambda: littered.value("select xmin is not null from pg_replication_slots"))
    wait_until(lambda: littered.value("select not active from pg_replication_slots"))

    finding = held_back(littered, 'replication slot "left_behind", without a standby')
    mend(littered, finding)

    assert finding["fix"].startswith("select pg_drop_replication_slot('left_behind');")
    wait_until(lambda: is_free(littered))


def test_a_session_in_another_database_holds_nothing_back(littered: Queue, cluster: Cluster) -> None:
    with cluster.connect("postgres", autocommit=False) as elsewhere:
        elsewhere.execute("set transaction isolation level repeatable read")
        elsewhere.execute("select 1")
        litter(littered)

        assert is_free(littered)
        assert findings(littered, "vacuum", now=3700) == []


def test_a_monitor_may_ask(db: DB, connect: Connect) -> None:
    queue = Queue(db)
    queue.endpoint("shop", {"url": "https://example.com/x", "signing_secret": "hunter2-2"}, protocol="http")

    told = connect("ulak_monitor").execute("select * from ulak.doctor()").fetchall()

    assert "signature" in [row[1] for row in told]
    assert "hunter2" not in str(told)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect("ulak_application").execute("select * from ulak.doctor()")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("login: broker:5672: ACCESS_REFUSED", "it refuses our credentials"),
        ("unroutable: exchange 'orders' has no queue for routing key 'a'", "no queue or stream takes its messages"),
        ("channel: broker:5672 closed it: NOT_FOUND", "it closes the channel"),
        ("refused: broker:5672 didn't take the message", "its queue or stream is full, or has failed"),
        ("redis: broker:6379: OOM command not allowed", "the broker refuses the messages"),
        ("mqtt: broker:1883: quota exceeded (0x97)", "the broker refuses the messages"),
        ("kafka: broker:9092: no leader (LEADER_NOT_AVAILABLE)", "the broker refuses the messages"),
        ("network: broker:1883 closed the connection", "the connection to it breaks off"),
        ("HTTP 429: too many", "it gets more messages than it can take"),
        ("HTTP 418: a teapot", "it refuses the messages"),
        ("anything else", "its answers don't count as success"),
        ("HTTP 500: not authorized", "it has an error of its own"),
    ],
)
def test_errors_of_brokers_have_a_cause_of_their_own(db: DB, error: str, cause: str) -> None:
    told = db.execute("select cause from ulak_private.advice('orders', %s)", ["[RETRYABLE] " + error]).fetchone()

    assert told == (cause,)


@pytest.mark.parametrize(
    ("alter", "severity"),
    [
        ("alter role ulak_worker in database {} set statement_timeout = '20s'", "critical"),
        ("alter role ulak_worker set statement_timeout = 20000", "critical"),
        ("alter database {} set statement_timeout = '5min'", "warning"),
        ("alter role all set statement_timeout = '20s'", "critical"),
    ],
)
def test_a_timeout_that_ends_every_run_of_a_worker_is_reported_until_start_has_lifted_it(
    queue: Queue, alter: str, severity: str
) -> None:
    queue.endpoint(protocol="log")
    database = queue.value("select current_database()")
    told = """select severity from ulak.doctor() where finding like 'statement_timeout ends each run%%'"""
    assert queue.column(told) == []

    queue.db.execute(alter.format(database))
    assert queue.column(told) == [severity]

    queue.db.execute("select ulak_private.lift_timeout()")
    assert queue.column(told) == []


def test_a_worker_whose_runs_end_with_an_error_is_named_with_the_error_for_an_hour(queue: Queue) -> None:
    queue.endpoint(config={"url": "https://example.com"}, protocol="http")
    queue.db.execute("select ulak_private.register_worker(3, 'worker 3, pid 5', false)")
    progress = {
        "state": "stopped",
        "in_flight": 0,
        "processed": 0,
        "failed": 0,
        "broken_by": "ValueError:\x1bbad",
        "held": [7],
    }

    for _ in range(2):
        queue.value("select ulak_private.worker_report(3, 'worker 3, pid 5', %s, '[]')", Jsonb(progress))
    findings = queue.column(
        "select finding from ulak.doctor(clock_timestamp() + interval '5 minutes') where finding ~ 'ended with'"
    )
    later = queue.column(
        "select finding from ulak.doctor(clock_timestamp() + interval '61 minutes') where finding ~ 'ended with'"
    )

    assert findings == ["2 runs of worker 3 ended with an error, the last one 5m 0s ago: ValueError: bad"]
    assert later == []


def test_an_endpoint_whose_host_is_no_longer_allowed_is_reported(queue: Queue) -> None:
    queue.call("set_secret", "hook", "https://hush.internal/hook")
    queue.endpoint("shop", HTTP, protocol="http")
    queue.endpoint("bus", {"broker": "k1.internal:9092,k2.internal:9092", "topic": "t"}, protocol="kafka")
    queue.endpoint("hushed", {"url": {"$secret": "hook"}}, protocol="http")
    queue.endpoint("off", HTTP, protocol="http")
    queue.call("disable_endpoint", "off")
    queue.call("configure", "http_allowed_hosts", "k1.internal")

    bus, hushed, shop = findings(queue, "hosts")
    mend(queue, shop)
    mend(queue, findings(queue, "hosts")[0])

    assert bus["finding"] == 'endpoint "bus": http_allowed_hosts does not list its broker (k2.internal)'
    assert shop["finding"] == 'endpoint "shop": http_allowed_hosts does not list its url (shop.internal)'
    assert hushed["finding"] == 'endpoint "hushed": http_allowed_hosts does not list its url (***)'
    assert [each["finding"] for each in findings(queue, "hosts")] == [hushed["finding"]]


def test_an_endpoint_that_needs_a_bound_secret_is_reported(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush")
    queue.call("set_secret", "bound", "hush-hush", "{shop.internal}")
    queue.endpoint("shop", {**HTTP, "headers": {"x-key": {"$secret": "token"}}}, protocol="http")
    queue.endpoint("good", {**HTTP, "headers": {"x-key": {"$secret": "bound"}}}, protocol="http")
    queue.call("configure", "require_bound_secrets", "true")

    finding = found(queue, "hosts")
    queue.call("set_secret", "token", "hush-hush", "{shop.internal}")

    assert finding["finding"] == (
        'endpoint "shop" gets no requests: secret "token" is bound to no hosts, and require_bound_secrets is on'
    )
    assert findings(queue, "hosts") == []
