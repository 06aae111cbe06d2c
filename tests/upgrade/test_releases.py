"""From this version to two made-up ones that come after it, and from the last release to this one: nothing is lost, everything flows, and
an upgrade that fails leaves everything as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster, stage_extension
from support.copies import current_version, use
from support.finished import column, value
from support.releases import FIRST, SECOND, MadeUp, make_releases, released
from support.rows import fill
from support.sessions import Running, wait_until

DB = psycopg.Connection[Any]


@dataclass(frozen=True)
class Upgrade:
    start: str
    end: str
    # Where the files of the end are, if the cluster hasn't got them.
    project: Path | None

    def run(self, db: DB) -> None:
        if self.project:
            use(db, self.project)
        db.execute("alter extension ulak update")
        assert version(db) == self.end


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    return make_releases(tmp_path_factory.mktemp("releases"))


@pytest.fixture(params=["made up", *released()])
def upgrade(request: pytest.FixtureRequest, made_up: MadeUp) -> Upgrade:
    if request.param == "made up":
        return Upgrade(current_version(), SECOND, made_up.second)
    return Upgrade(request.param, current_version(), None)


@pytest.fixture
def old(cluster: Cluster, empty_database: str, upgrade: Upgrade) -> Iterator[DB]:
    cluster.install(empty_database, upgrade.start)
    # A later version may bring roles that have members, from a database before this one.
    cluster.execute(f'alter database "{empty_database}" set ulak.accept_roles = on', empty_database)
    with cluster.connect(empty_database) as connection:
        yield connection


@pytest.fixture
def sender(cluster: Cluster, old: DB) -> Iterator[DB]:
    """A session in a transaction."""
    with cluster.connect(old.info.dbname, autocommit=False) as connection:
        yield connection


def version(db: DB) -> str:
    return str(value(db, "select extversion from pg_extension where extname = 'ulak'"))


def is_blocked(observer: DB, session: DB) -> bool:
    return bool(value(observer, "select cardinality(pg_blocking_pids(%s)) > 0", session.info.backend_pid))


def upgrade_beside(db: DB, sender: DB, upgrade: Upgrade) -> None:
    """A step that needs a table for itself waits for the end of the sender's transaction."""
    with psycopg.connect(db.info.dsn, autocommit=True) as observer:
        running = Running(lambda: upgrade.run(db))
        wait_until(lambda: running.is_done() or is_blocked(observer, db), "the upgrade")
        sender.commit()
        running.result()


# The catalog and the rows.


@pytest.fixture
def fresh(cluster: Cluster, upgrade: Upgrade) -> Iterator[DB]:
    with cluster.database("fresh") as name, cluster.connect(name) as connection:
        if upgrade.project:
            use(connection, upgrade.project)
        connection.execute("set ulak.accept_roles = on")
        connection.execute("create extension ulak cascade")
        yield connection


def test_an_upgraded_database_equals_a_fresh_one(old: DB, fresh: DB, upgrade: Upgrade) -> None:
    upgrade.run(old)

    assert version(fresh) == upgrade.end
    assert catalog.differences(catalog.snapshot(old), catalog.snapshot(fresh)) == []


@pytest.mark.parametrize("upgrade", ["made up"], indirect=True)
def test_the_versions_in_between_lead_to_the_same(
    cluster: Cluster, empty_database: str, fresh: DB, made_up: MadeUp
) -> None:
    """It begins with the script that was kept of the release."""
    with cluster.connect(empty_database) as old:
        use(old, made_up.first)
        old.execute(f"create extension ulak version '{current_version()}' cascade")
        old.execute("alter extension ulak update")
        assert version(old) == FIRST
        use(old, made_up.second)

        old.execute("alter extension ulak update")

        assert version(old) == SECOND
        assert catalog.differences(catalog.snapshot(old), catalog.snapshot(fresh)) == []


def test_each_earlier_version_has_an_upgrade_to_this_one_alone(made_up: MadeUp, tmp_path: Path) -> None:
    stage_extension(tmp_path, made_up.second)

    steps = {path.name: path.read_text() for path in tmp_path.glob("build/ulak--*--*.sql")}
    both, one = steps[f"ulak--{current_version()}--{SECOND}.sql"], steps[f"ulak--{FIRST}--{SECOND}.sql"]
    assert len(steps) == 2
    assert both.endswith(one)
    assert re.findall(r"alter table (\S+) add", both) == ["ulak_private.deliveries", "ulak.endpoints"]
    assert re.findall(r"alter table (\S+) add", one) == ["ulak.endpoints"]


def test_every_row_comes_over(old: DB, sender: DB, upgrade: Upgrade) -> None:
    fill(old)
    before = catalog.contents(old, by_partition=False)

    upgrade_beside(old, sender, upgrade)

    after = catalog.kept(before, catalog.contents(old, by_partition=False))
    before = catalog.kept(before, before)
    assert catalog.lost(before, after) == catalog.lost(after, before) == []


# Messages.

SEND = "select ulak.send('shop', jsonb_build_object('key', %s::text, 'n', %s::integer), p_ordering_key => %s)"


def send(session: DB, key: str, number: int) -> None:
    session.execute(SEND, [key, number, key])


def claim_key(db: DB, key: str) -> tuple[int, int]:
    """The head of a key; what else was claimed on the way is given back."""
    claims = db.execute("select id, attempt, ordering_key from ulak.claim('w', 1000, 'shop')").fetchall()
    for id, attempt, found in claims:
        if found != key:
            db.execute("select ulak.release(%s, 'w', %s)", [id, attempt])
    ((id, attempt),) = [(id, attempt) for id, attempt, found in claims if found == key]
    return id, attempt


def send_keys(db: DB, sender: DB) -> tuple[int, int]:
    """Of each key, none or some messages are done and the rest waits: see KEYS. The sender stays in a transaction, with the last one of
    "uncommitted". Returns the (id, attempt) that worker "w" has in flight."""
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    for key in ("retried", "dead", "waiting", "in flight", "uncommitted"):
        for number in (1, 2, 3):
            send(db, key, number)
    db.execute("select ulak.fail(%s, 'w', %s, 'no luck', '1 hour')", claim_key(db, "retried"))
    db.execute("select ulak.fail(%s, 'w', %s, 'no', p_permanent => true)", claim_key(db, "dead"))
    in_flight = claim_key(db, "in flight")
    # Its second message was uncommitted when the first was settled: it waits at infinity for the sweep.
    send(db, "overlooked", 1)
    claimed = claim_key(db, "overlooked")
    send(sender, "overlooked", 2)
    db.execute("select ulak.complete(%s, 'w', %s)", claimed)
    sender.commit()
    send(db, "overlooked", 3)
    send(sender, "uncommitted", 4)
    return in_flight


# What is left of each key when everything is delivered, in this order.
KEYS = {
    "overlooked": [2, 3],
    "retried": [1, 2, 3],
    "dead": [2, 3],
    "waiting": [1, 2, 3],
    "in flight": [1, 2, 3],
    "uncommitted": [1, 2, 3, 4],
}


def deliver(db: DB) -> dict[str, list[int]]:
    """What a worker gets of each key of the shop, all that waits, a day later."""
    found: dict[str, list[int]] = {}
    now = "now() + interval '1 day'"
    db.execute("select ulak_private.sweep()")
    while claims := db.execute(
        f"select id, attempt, payload from ulak.claim('w', 100, 'shop', p_now => {now})"
    ).fetchall():
        for id, attempt, payload in claims:
            found.setdefault(payload["key"], []).append(payload["n"])
            db.execute(f"select ulak.complete(%s, 'w', %s, p_now => {now})", [id, attempt])
    return found


def test_every_key_flows_in_its_order(old: DB, sender: DB, upgrade: Upgrade) -> None:
    in_flight = send_keys(old, sender)

    upgrade_beside(old, sender, upgrade)

    # Its worker lives on and reports to the new version.
    old.execute("select ulak.complete(%s, 'w', %s)", in_flight)
    found = deliver(old)
    assert {**found, "in flight": [1, *found["in flight"]]} == KEYS
    assert value(old, "select count(*) from ulak.queue") == 0


def test_messages_in_flight_without_a_worker_are_taken_back(old: DB, sender: DB, upgrade: Upgrade) -> None:
    send_keys(old, sender)

    upgrade_beside(old, sender, upgrade)

    assert value(old, "select ulak.recover_stale_messages(now() + interval '1 hour')") == 1
    assert deliver(old)["in flight"] == [1, 2, 3]


# Sessions that were there before.


def test_a_session_goes_on_sending_to_the_key_that_it_used_before(old: DB, sender: DB, upgrade: Upgrade) -> None:
    """Its plans, and what its functions remember, are of the old version."""
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    for number in (1, 2):
        send(sender, "k", number)
        sender.commit()

    upgrade.run(old)

    for number in (3, 4):
        send(sender, "k", number)
        sender.commit()
    assert deliver(old) == {"k": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("table", "call"),
    [
        ("event_types", "ulak.publish('sold', '1')"),
        ("event_types", """ulak.publish_batch('[{"event_type": "sold", "payload": 1}]')"""),
        ("endpoints", "ulak.send('shop', '1', 3, p_idempotency_key => 'k')"),
        ("endpoints", """ulak.send_messages('shop', '[{"payload": 1, "priority": 3}]')"""),
    ],
)
def test_a_sender_in_the_middle_of_its_call_goes_on(
    cluster: Cluster, old: DB, sender: DB, upgrade: Upgrade, table: str, call: str
) -> None:
    """It waits for the upgrade inside a function of the old version, and calls that again after."""
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    old.execute("select ulak.subscribe('sold', 'shop')")
    with cluster.connect(old.info.dbname, autocommit=False) as upgrader:
        upgrader.execute(f"lock table ulak.{table} in access exclusive mode")
        running = Running(lambda: sender.execute(f"select {call} from generate_series(1, 1)").fetchall())
        wait_until(lambda: is_blocked(old, sender), "the sender")
        upgrade.run(upgrader)
        upgrader.commit()

    assert len(running.result()) == 1
    sender.execute(f"select {call}")
    sender.commit()
    assert set(column(old, "select payload from ulak.queue")) == {1}


def test_a_function_of_the_application_that_depends_on_send_or_publish_goes_on(old: DB, upgrade: Upgrade) -> None:
    old.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('sold')")
    old.execute("select ulak.subscribe('sold', 'shop')")
    old.execute("create function sell() returns integer begin atomic select ulak.publish('sold', '1'); end")
    old.execute("create function post() returns bigint begin atomic select ulak.send('shop', '2', 1); end")

    upgrade.run(old)

    assert old.execute("select sell(), post() > 0").fetchone() == (1, True)
    assert old.execute("select payload, priority from ulak.queue order by id").fetchall() == [(1, 0), (2, 1)]


NAMES = """
    select pronamespace::regnamespace || '.' || proname from pg_proc
    where pronamespace::regnamespace::text in ('ulak', 'ulak_private')
    union select relnamespace::regnamespace || '.' || relname from pg_class
    where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
"""


def test_a_session_in_the_middle_of_a_function_or_of_python_finds_all_that_it_uses(old: DB, upgrade: Upgrade) -> None:
    texts = column(old, "select prosrc from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')")
    texts += column(old, "select source from ulak_private.python_source()")
    used = {name for text in texts for name in re.findall(r"\bulak(?:_private)?\.\w+", text)}
    used &= set(column(old, NAMES))

    upgrade.run(old)

    assert len(used) > 300
    assert used - set(column(old, NAMES)) == set()


# Upgrades that don't come to their end.


def assert_works(db: DB) -> None:
    """Sends, delivers, maintains and runs Python."""
    db.execute("select ulak.create_endpoint('probe', 'pull', '{}')")
    db.execute("select ulak.send('probe', '{}', p_ordering_key => 'k') from generate_series(1, 2)")
    for _ in range(2):
        ((id, attempt),) = db.execute("select id, attempt from ulak.claim('p', 10, 'probe')").fetchall()
        db.execute("select ulak.complete(%s, 'p', %s)", [id, attempt])
    db.execute("call ulak.run_maintenance()")
    assert column(db, "select last_error from ulak.maintenance_status where last_error is not null") == []
    db.execute("call ulak.run_worker(1, 0.1)")
    assert value(db, "select ulak.report()").lower().startswith("<!doctype html>")


def assert_unchanged(db: DB, start: str, before: tuple[Any, Any]) -> None:
    assert version(db) == start
    assert catalog.differences(catalog.snapshot(db), before[0]) == []
    after = catalog.contents(db)
    assert catalog.lost(before[1], after) == catalog.lost(after, before[1]) == []


def test_an_upgrade_that_is_rolled_back_leaves_everything_as_it_was(old: DB, upgrade: Upgrade) -> None:
    fill(old)
    before = catalog.snapshot(old), catalog.contents(old)

    with old.transaction(force_rollback=True):
        upgrade.run(old)

    assert_unchanged(old, upgrade.start, before)
    assert_works(old)
    upgrade.run(old)


@pytest.mark.parametrize("place", [f"sql/upgrade/*--{SECOND}.sql", "sql/code/9_installing/triggers.sql"])
def test_an_upgrade_that_fails_midway_leaves_everything_as_it_was(
    cluster: Cluster, database: str, tmp_path: Path, place: str
) -> None:
    project = make_releases(tmp_path).second
    (script,) = project.glob(place)
    with script.open("a") as file:
        file.write("\ndo $$ begin raise exception 'no further'; end $$;\n")
    with cluster.connect(database) as db:
        fill(db)
        before = catalog.snapshot(db), catalog.contents(db)
        use(db, project)

        with pytest.raises(psycopg.errors.RaiseException, match="no further"):
            db.execute("alter extension ulak update")

        assert_unchanged(db, current_version(), before)
        assert_works(db)


# Servers that have the files of the second version alone.

CLAIM = "select id from ulak.claim('w', 1, 'filled_pull')"
MESSAGES = "select id, status, payload from ulak.messages order by id"


class Moved:
    """A database of this version, that pg_upgrade took there."""

    def __init__(self, old: Cluster, new: Cluster) -> None:
        self.cluster = new
        old.install(old.create_database("shop"))
        with old.connect("shop") as db:
            fill(db)
            self.rows = catalog.contents(db, by_partition=False)
        for cluster in (old, new):
            cluster.stop()
        new.take_over(old)
        new.start()


@pytest.fixture(scope="module")
def moved(made_up: MadeUp) -> Iterator[Moved]:
    settings = {"shared_preload_libraries": ""}
    old = Cluster.create(settings=settings, in_memory=True)
    new = Cluster.create(settings=settings, in_memory=True, project=made_up.second)
    yield Moved(old, new)
    new.remove()
    old.remove()


def test_a_database_is_upgraded_after_pg_upgrade(moved: Moved) -> None:
    with moved.cluster.connect("shop") as db:
        db.execute("alter extension ulak update")

        assert version(db) == SECOND
        after = catalog.kept(moved.rows, catalog.contents(db, by_partition=False))
        before = catalog.kept(moved.rows, moved.rows)
        assert catalog.lost(before, after) == catalog.lost(after, before) == []
        assert value(db, "select status from ulak.health_check() where component = 'cluster'") == "ok"
        assert len(column(db, CLAIM)) == 1


def test_a_dump_is_restored_into_a_later_version_and_held(
    cluster: Cluster, db: DB, moved: Moved, tmp_path: Path
) -> None:
    fill(db)
    sent = db.execute(MESSAGES).fetchall()
    dump = cluster.dump(db.info.dbname, tmp_path / "dump", "--format=custom")
    with moved.cluster.database("restored") as name, moved.cluster.connect(name) as restored:
        moved.cluster.restore(name, dump)

        assert version(restored) == SECOND
        assert restored.execute(MESSAGES).fetchall() == sent
        assert column(restored, CLAIM) == []
        assert value(restored, "select ulak.adopt()") > 0
        assert len(column(restored, CLAIM)) == 1
