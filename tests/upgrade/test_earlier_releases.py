"""From each release to this version: nothing is lost, everything flows, and an upgrade that fails leaves the release as it was."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog, earlier_releases
from support.cluster import PROJECT, Cluster
from support.copies import copy_project, current_version, use
from support.earlier_releases import LAST, RELEASES
from support.sessions import Running, wait_until

DB = psycopg.Connection[Any]

# What this version no longer uses, and what it may rewrite: where a message of a key waits is an internal matter.
MOVED = """
    bell claim_position cluster_home cluster_identity dlq_id_seq endpoint_headroom locks maintenance_runs messages_cancelled ordering_keys
    pull_position queue_headroom schedule secrets
"""
RENAMED = {
    "ulak.queue": "ulak_private.deliveries",
    "ulak.dlq": "ulak_private.letters",
    "ulak.archive": "ulak_private.archived",
    **{f"ulak.{name}": f"ulak_private.{name}" for name in MOVED.split()},
}
DROPPED = {"ulak.ordering_wakeups", "ulak.ordering_wakeups_id_seq"}
REWRITTEN = {"next_retry_at", "updated_at"}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def old(cluster: Cluster, empty_database: str, release: str) -> Iterator[DB]:
    cluster.install(empty_database, release)
    # Roles that came after 0.1.0 have members, from a database before this one.
    cluster.execute(f'alter database "{empty_database}" set ulak.accept_roles = on', empty_database)
    with cluster.connect(empty_database) as connection:
        yield connection


@pytest.fixture
def sender(cluster: Cluster, old: DB) -> Iterator[DB]:
    """A session in a transaction."""
    with cluster.connect(old.info.dbname, autocommit=False) as connection:
        yield connection


def version(db: DB) -> str:
    row = db.execute("select extversion from pg_extension where extname = 'ulak'").fetchone()
    assert row is not None
    return str(row[0])


def upgrade(db: DB, sender: DB) -> None:
    """Beside a sender in its transaction. A step that needs a table for itself waits for the sender's end."""
    with db.cursor() as cursor, psycopg.connect(db.info.dsn, autocommit=True) as observer:
        running = Running(lambda: cursor.execute("alter extension ulak update"))
        blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
        wait_until(
            lambda: running.is_done() or (observer.execute(blocked, [db.info.backend_pid]).fetchone() or [False])[0],
            "the upgrade",
        )
        sender.commit()
        running.result()


def kept(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """One line per table of which a row is gone, by the columns that both versions have."""
    problems = []
    for table, texts in before.items():
        if table in DROPPED and table not in after:
            continue
        old_rows = [json.loads(text) if text.startswith("{") else text for text in texts]
        new_rows = [
            json.loads(text) if text.startswith("{") else text for text in after.get(RENAMED.get(table, table), [])
        ]
        if old_rows and isinstance(old_rows[0], dict):
            columns = old_rows[0].keys() & (new_rows[0].keys() if new_rows else set())
            if table == "ulak.queue":
                columns -= REWRITTEN
            old_rows, new_rows = (
                [json.dumps({c: r[c] for c in sorted(columns)}) for r in o] for o in (old_rows, new_rows)
            )
        if missing := Counter(old_rows) - Counter(new_rows):
            problems.append(f"{table}: {missing.total()} of {len(old_rows)}, such as {next(iter(missing))}")
    return problems


def deliver(db: DB) -> dict[str, list[int]]:
    """What a worker gets of each key of the shop, all that waits, a day later."""
    found: dict[str, list[int]] = {}
    now = "now() + interval '1 day'"
    while claims := db.execute(
        f"select id, attempt, payload from ulak.claim('w', 100, 'shop', p_now => {now})"
    ).fetchall():
        for id, attempt, payload in claims:
            found.setdefault(payload.get("key", "none"), []).append(payload.get("n", 0))
            db.execute(f"select ulak.complete(%s, 'w', %s, p_now => {now})", [id, attempt])
    return found


def test_every_row_comes_over(old: DB, sender: DB) -> None:
    earlier_releases.fill(old, sender)
    before = catalog.contents(old, by_partition=False)
    assert {table for table, rows in before.items() if not rows} <= {"ulak.locks"}

    upgrade(old, sender)

    after = catalog.contents(old, by_partition=False)
    assert version(old) == current_version()
    assert kept(before, after) == []


def test_every_key_flows_in_its_order(old: DB, sender: DB) -> None:
    (id, attempt) = earlier_releases.fill(old, sender)

    upgrade(old, sender)

    # Its worker lives on and reports to the new version.
    old.execute("select ulak.complete(%s, 'w', %s)", [id, attempt])
    found = {"in flight": [1]}
    for key, numbers in deliver(old).items():
        found[key] = found.get(key, []) + numbers
    assert {key: numbers for key, numbers in found.items() if key != "none"} == earlier_releases.KEYS
    assert len(found["none"]) == 3
    left = old.execute(
        """
        select e.name, q.status from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
        where q.status in ('pending', 'processing') and e.name <> 'web'
        """
    ).fetchall()
    assert left == [("disabled", "pending")]


def test_a_message_that_the_old_version_left_parked_without_a_predecessor_flows(old: DB, sender: DB) -> None:
    earlier_releases.fill(old, sender)
    parked = (
        "select id from ulak.queue where status = 'pending' and next_retry_at = 'infinity' order by id desc limit 1"
    )
    (message,) = old.execute(parked).fetchone() or (None,)
    old.execute(
        """
        delete from ulak.queue h using ulak.queue q
        where q.id = %s and h.id <> q.id and h.endpoint_id = q.endpoint_id and h.ordering_key = q.ordering_key
        """,
        [message],
    )

    upgrade(old, sender)
    old.execute("select ulak_private.sweep()")

    due = "select next_retry_at <= now() from ulak.queue where id = %s"
    assert old.execute(due, [message]).fetchone() == (True,)


def test_messages_in_flight_without_a_worker_are_taken_back(old: DB, sender: DB) -> None:
    earlier_releases.fill(old, sender)

    upgrade(old, sender)

    assert old.execute("select ulak.recover_stale_messages(now() + interval '1 hour')").fetchone() == (1,)
    assert deliver(old)["in flight"] == [1, 2, 3]


def test_a_session_goes_on_sending_to_the_key_that_it_used_before(old: DB, sender: DB) -> None:
    """Its plans, and what its functions remember, are of the old version."""
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    for number in (1, 2):
        earlier_releases.send(sender, "k", number)
        sender.commit()

    old.execute("alter extension ulak update")

    for number in (3, 4):
        earlier_releases.send(sender, "k", number)
        sender.commit()
    assert deliver(old) == {"k": [1, 2, 3, 4]}


# Sessions in the middle of a function of the release before this one. Earlier ones have to come by way of it.


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_a_publisher_in_the_middle_of_its_call_goes_on(cluster: Cluster, old: DB, sender: DB) -> None:
    """It waits for a lock that the upgrade holds, inside the publish() of the old version, and calls that again after."""
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    old.execute("select ulak.subscribe('sold', 'shop')")
    with cluster.connect(old.info.dbname, autocommit=False) as upgrader:
        upgrader.execute("lock table ulak.event_types in access exclusive mode")
        publish = "select ulak.publish('sold', to_jsonb(n)) from generate_series(1, 3) n"
        running = Running(lambda: sender.execute(publish).fetchall())
        blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
        wait_until(
            lambda: bool((old.execute(blocked, [sender.info.backend_pid]).fetchone() or [False])[0]), "the sender"
        )
        upgrader.execute("alter extension ulak update")
        upgrader.commit()

    assert running.result() == [(1,)] * 3
    sender.commit()
    assert version(old) == current_version()
    assert old.execute("select payload from ulak.queue order by id").fetchall() == [(1,), (2,), (3,)]


@pytest.mark.parametrize("release", [LAST], indirect=True)
@pytest.mark.parametrize(
    ("table", "call"),
    [
        ("endpoints", """ulak.send_messages('shop', '[{"payload": 1, "priority": 3}]')"""),
        ("event_types", """ulak.publish_batch('[{"event_type": "sold", "payload": 1}]')"""),
    ],
)
def test_a_batch_that_waits_for_the_upgrade_goes_on(
    cluster: Cluster, old: DB, sender: DB, table: str, call: str
) -> None:
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    old.execute("select ulak.subscribe('sold', 'shop')")
    with cluster.connect(old.info.dbname, autocommit=False) as upgrader:
        upgrader.execute(f"lock table ulak.{table} in access exclusive mode")
        running = Running(lambda: sender.execute(f"select {call}").fetchall())
        blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
        wait_until(
            lambda: bool((old.execute(blocked, [sender.info.backend_pid]).fetchone() or [False])[0]), "the sender"
        )
        upgrader.execute("alter extension ulak update")
        upgrader.commit()

    assert len(running.result()) == 1
    sender.commit()
    assert old.execute("select payload from ulak.queue").fetchall() == [(1,)]


def test_a_function_of_the_application_that_depends_on_send_or_publish_goes_on(old: DB) -> None:
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    old.execute("select ulak.subscribe('sold', 'shop')")
    old.execute("create function sell() returns integer begin atomic select ulak.publish('sold', '1'); end")
    old.execute("create function post() returns bigint begin atomic select ulak.send('shop', '2', 1); end")

    old.execute("alter extension ulak update")

    assert old.execute("select sell(), post() > 0").fetchone() == (1, True)
    assert old.execute("select payload, priority from ulak.queue order by id").fetchall() == [(1, 0), (2, 1)]


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_a_worker_in_the_middle_of_its_run_finds_all_that_it_calls(old: DB) -> None:
    source = "".join(text for (text,) in old.execute("select source from ulak._python_source()"))
    called = set(re.findall(r"\bulak\.(_\w+)\(", source))
    old.execute("alter extension ulak update")

    there = {name for (name,) in old.execute("select proname from pg_proc where pronamespace = 'ulak'::regnamespace")}
    assert len(called) > 15
    assert called <= there


# What a call of 0.2.0 no longer finds if it waits for the upgrade, by the call, which fails then, as CHANGELOG says.
GONE = {
    "send": "_check_idempotency_keys _enqueue_once _first_of_idempotency_key _insert_messages _insert_unless_known _new_rows _send _send_request",
    "send_batch": "_enqueue_many",
    "claim": "_endpoints_in_turn _lock_due _next_level _take_turn",
    "redrive": "_matching_letters _sample_of_letters",
    "purge": "_command",
    "replay_range": "_archived_history _check_replay _insert_replayed _replay",
    "history": "_find_message",
    "archive_completed_messages": "_archive_batch _archive_partitions",
    "explain": "_explain_attempt _explain_cycles _explain_end _explain_in_flight _explain_next _explain_turn _explain_waiting",
    "doctor": "_doctor_roles",
    "report": "_report_circuits _traffic_is_final_before",
    "top": "_endpoint_health _endpoint_state _pain",
    "metrics": "_metric_definitions _raise_undefined_metric",
    "start": "_is_our_job _is_stray_job _unschedule_command",
    "schedule": "_is_recurring_job _recurring_job _recurring_jobs",
}
# What is called where nothing has waited for the upgrade: by subscribe() and metrics() first of all, by start() after a login, and by
# what makes months of the archive, which gives up when it can't lock the archive at once; or by a step of maintenance, which notes the
# error and leaves its work to the next run.
NOT_MISSED = """
    _check_predicate _create_archive_table _login_fix _login_rule _metric_values _move_from_default
    _cleanup _next_roll_up _roll_up_samples _roll_up_stats
"""


def test_calls_that_fail_if_they_wait_for_the_upgrade_are_named_in_the_changelog() -> None:
    steps = (PROJECT / "CHANGELOG.md").read_text().partition("### How to move from 0.2.0")[2].partition("\n###")[0]

    assert [call for call in GONE if f"`{call}()`" not in steps] == []


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_a_function_in_the_middle_of_its_run_finds_all_that_it_uses(old: DB) -> None:
    """By the names of 0.2.0, which ulak_private.forget_0_2_0() takes away."""
    bodies = [body for (body,) in old.execute("select prosrc from pg_proc where pronamespace = 'ulak'::regnamespace")]
    used = {name for body in bodies for name in re.findall(r"\bulak\.(\w+)", body)}
    names = """
        select proname from pg_proc where pronamespace = 'ulak'::regnamespace
        union select relname from pg_class where relnamespace = 'ulak'::regnamespace
        union select typname from pg_type where typnamespace = 'ulak'::regnamespace
    """
    before = {name for (name,) in old.execute(names)}
    old.execute("alter extension ulak update")

    after = {name for (name,) in old.execute(names)}
    assert sorted((used & before) - after) == sorted(" ".join([*GONE.values(), NOT_MISSED]).split())


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_what_stands_for_a_function_of_the_last_release_calls_one_that_there_is(old: DB) -> None:
    old.execute("alter extension ulak update")
    definitions = old.execute(
        """
        select p.oid::regprocedure::text, pg_get_functiondef(p.oid)
        from pg_proc p
        where p.pronamespace = 'ulak'::regnamespace and starts_with(p.proname, '_') and p.prokind in ('f', 'p')
        """
    ).fetchall()
    errors = []
    old.execute("set check_function_bodies = on")
    for name, definition in definitions:
        try:
            old.execute(definition)
        except psycopg.Error as error:
            errors.append(f"{name}: {error}")

    assert len(definitions) > 100
    assert errors == []


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_a_message_that_is_inserted_with_a_key_keeps_its_key(old: DB) -> None:
    """As a session of 0.2.0 inserts it, into what was a table."""
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    old.execute("alter extension ulak update")
    old.execute(
        """
        insert into ulak.queue (endpoint_id, payload, idempotency_key, payload_hash)
        select id, '1', 'k', ulak._payload_hash('1') from ulak.endpoints
        """
    )

    again = old.execute("select ulak.send('shop', '1', p_idempotency_key => 'k')").fetchone()

    assert old.execute("select id from ulak.queue").fetchall() == [again]


@pytest.mark.parametrize("release", ["0.1.0"], indirect=True)
def test_receivers_of_cloudevents_go_on_getting_them_in_the_mode_that_they_know(old: DB) -> None:
    for name, config in (
        ("a", {"cloudevents": True}),
        ("b", {"cloudevents_mode": "binary", "cloudevents": True}),
        ("c", {}),
    ):
        config = {"url": "https://example.com", **config}
        old.execute("select ulak.create_endpoint(%s, 'http', %s)", [name, json.dumps(config)])

    old.execute("alter extension ulak update")

    modes = old.execute("select name, config ->> 'cloudevents_mode' from ulak.endpoints order by 1").fetchall()
    assert modes == [("a", "structured"), ("b", "binary"), ("c", None)]


@pytest.mark.parametrize("release", ["0.1.0"], indirect=True)
def test_what_version_0_1_0_counted_is_still_read(old: DB) -> None:
    # 100 requests from 16 to 32 ms, and 7 of less than 1 ms in all.
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    old.execute(
        """
        insert into ulak.endpoint_stats (endpoint_id, minute, delivered, latency_histogram)
        select id, date_trunc('minute', now()), 100, '{0,0,0,0,0,100}' from ulak.endpoints
        """
    )
    old.execute(
        """
        insert into ulak.endpoint_totals (endpoint_id, delivered, latency_histogram)
        select id, 107, '{7,0,0,0,0,100}' from ulak.endpoints
        """
    )

    old.execute("alter extension ulak update")

    top = old.execute("select trim(p50), trim(p95), trim(slowest) from ulak.top(p_now => now())").fetchall()
    assert top == [("23ms", "31ms", "32ms")]
    buckets = old.execute(
        """
        select metric_value
        from ulak.metrics()
        where metric_name = 'delivery_duration_seconds_bucket' and labels ->> 'le' in ('0.001', '0.016', '0.032', '+Inf')
        """
    ).fetchall()
    assert buckets == [(7,), (7,), (107,), (107,)]


@pytest.mark.parametrize("release", ["0.2.0"], indirect=True)
def test_routes_go_on_taking_the_values_that_they_took(old: DB) -> None:
    kafka, mqtt = {"broker": "kafka:9092"}, {"broker": "mqtt"}
    for name, protocol, config in (
        ("a", "mqtt", {**mqtt, "topic": "tenants/{tenant}/events"}),
        ("b", "mqtt", {**mqtt, "topic": "orders/{event_type}"}),
        ("c", "kafka", {**kafka, "topic": "shop.{event_type}"}),
        ("d", "kafka", {**kafka, "topic": "shop.{event_type}.{shop}"}),
        ("e", "redis", {"host": "redis", "stream_key": {"$secret": "key"}}),
        ("f", "redis", {"host": "redis", "stream_key": "{tenant}"}),
        ("g", "amqp", {"host": "rabbit", "exchange": "e"}),
    ):
        old.execute("select ulak.set_secret('key', 'orders:{tenant}')")
        old.execute("select ulak.create_endpoint(%s, %s, %s)", [name, protocol, json.dumps(config)])

    old.execute("alter extension ulak update")

    allowed = old.execute("select name from ulak.endpoints where config ? 'allow_separators' order by 1").fetchall()
    assert [name for (name,) in allowed] == ["a", "b", "d", "e"]
    # Altered as it is, with the secret where it was.
    old.execute("select ulak.alter_endpoint(name, config || '{\"max_in_flight\": 5}') from ulak.endpoints")
    old.execute("select ulak.set_secret('key', 'orders')")


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_a_dump_of_the_last_release_is_restored_by_way_of_it(
    cluster: Cluster, old: DB, sender: DB, release: str, tmp_path: Path
) -> None:
    """As the runbook says: the extension first, as the release, and as a restore makes it; then the dump; then the upgrade."""
    earlier_releases.fill(old, sender)
    sender.commit()
    sent = old.execute("select count(*), count(idempotency_key) from ulak.queue").fetchone()
    dump = cluster.dump(old.info.dbname, tmp_path / "dump", "--format=custom")
    with cluster.database("of_the_last_release") as name, cluster.connect(name) as target:
        target.execute("set row_security = off")
        target.execute("set ulak.accept_roles = on")
        target.execute(f"create extension ulak version '{release}' cascade")  # type: ignore[arg-type]
        cluster.restore(name, dump)

        target.execute("alter extension ulak update")

        assert version(target) == current_version()
        assert target.execute("select count(*), count(idempotency_key) from ulak.queue").fetchone() == sent
        assert target.execute("select count(*) from ulak.queue where payload is null").fetchone() == (0,)


# Failed upgrades.


def assert_works(db: DB) -> None:
    """Sends, delivers, maintains and runs Python."""
    db.execute("select ulak.create_endpoint('probe', 'pull', '{}')")
    db.execute("select ulak.send('probe', '{}', p_ordering_key => 'k') from generate_series(1, 2)")
    for _ in range(2):
        ((id, attempt),) = db.execute("select id, attempt from ulak.claim('p', 10, 'probe')").fetchall()
        db.execute("select ulak.complete(%s, 'p', %s)", [id, attempt])
    db.execute("call ulak.run_maintenance()")
    failed = db.execute("select step, last_error from ulak.maintenance_status where last_error is not null").fetchall()
    db.execute("call ulak.run_worker(1, 0.1)")
    page = db.execute("select ulak.report()").fetchone()
    assert failed == []
    assert page is not None
    assert page[0].lower().startswith("<!doctype html>")


def assert_unchanged(db: DB, release: str, before: tuple[Any, Any]) -> None:
    assert version(db) == release
    assert catalog.differences(catalog.snapshot(db), before[0]) == []
    after = catalog.contents(db)
    assert catalog.lost(before[1], after) == catalog.lost(after, before[1]) == []


def test_an_upgrade_that_is_rolled_back_leaves_the_old_version(old: DB, sender: DB, release: str) -> None:
    earlier_releases.fill(old, sender)
    sender.commit()
    before = catalog.snapshot(old), catalog.contents(old)

    with old.transaction(force_rollback=True):
        old.execute("alter extension ulak update")
        assert version(old) == current_version()

    assert_unchanged(old, release, before)
    assert_works(old)
    old.execute("alter extension ulak update")


@pytest.mark.parametrize("place", ["sql/upgrade", "sql/code/5_settling/midway.sql", "sql/code/9_installing/zzz.sql"])
def test_an_upgrade_that_fails_midway_leaves_the_old_version(
    old: DB, sender: DB, release: str, tmp_path: Path, place: str
) -> None:
    earlier_releases.fill(old, sender)
    sender.commit()
    before = catalog.snapshot(old), catalog.contents(old)
    project = copy_project(tmp_path)
    script = project / (place if place.endswith(".sql") else f"{place}/{LAST}--{current_version()}.sql")
    with script.open("a") as file:
        file.write("\ndo $$ begin raise exception 'no further'; end $$;\n")
    with psycopg.connect(old.info.dsn, autocommit=True) as db:
        use(db, project)

        with pytest.raises(psycopg.errors.RaiseException, match="no further"):
            db.execute("alter extension ulak update")

        assert_unchanged(db, release, before)
        assert_works(db)
    old.execute("alter extension ulak update")
    assert version(old) == current_version()


def test_each_step_of_the_upgrade_says_what_it_locks() -> None:
    """A statement that alters, creates or fills a table stands below a comment that speaks of locks or waiting."""
    script = (PROJECT / f"sql/upgrade/{LAST}--{current_version()}.sql").read_text()
    silent, said = [], False
    for line in script.splitlines():
        if line.startswith("--"):
            said = said or "lock" in line.lower() or "wait" in line.lower()
        elif line.startswith(
            ("alter table", "create index", "create unique index", "update ", "drop table", "drop index")
        ):
            if not said:
                silent.append(line)
        elif not line.strip():
            said = False

    assert silent == []


@pytest.mark.parametrize("release", [LAST], indirect=True)
def test_applications_may_do_what_they_did_until_sending_is_granted_to_one(cluster: Cluster, old: DB) -> None:
    database = old.info.dbname
    for name in ("test_bank", "test_shop"):
        cluster.ensure_login(old, name, member_of="ulak_application")
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.grant_endpoint('shop', 'test_ulak_consumer')")
    send = "select ulak.send('shop', '1', p_idempotency_key => 'k')"
    with cluster.connect(database, "test_bank") as bank:
        sent = bank.execute(send).fetchone()

    old.execute("alter extension ulak update")

    with cluster.connect(database, "test_shop") as shop, cluster.connect(database, "ulak_consumer") as consumer:
        assert shop.execute(send).fetchone() == sent
        assert shop.execute("select id, sent_by from ulak.find_messages('shop')").fetchall() == [(*(sent or ()), None)]
        assert shop.execute("select what from ulak.explain(%s)", sent).fetchone() == ('sent to endpoint "shop"',)
        assert consumer.execute("select id from ulak.claim('w', 1)").fetchall() == [sent]
        assert shop.execute("select ulak.send('shop', '1')").fetchone() > sent
        old.execute("select ulak.grant_endpoint('shop', 'test_bank', 'send')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            shop.execute("select ulak.send('shop', '1')")
