"""ulak-setup on a cluster as Debian makes one: from nothing to a delivery, once; what it leaves alone; and back again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.bare_cluster import bare
from support.debians_cluster import DebiansCluster, run_setup
from support.receiver import Receiver
from support.sessions import wait_until

pytestmark = pytest.mark.skipif(shutil.which("pg_createcluster") is None, reason="needs Debian's postgresql-common")


@pytest.fixture
def cluster() -> Iterator[DebiansCluster]:  # type: ignore[override]
    cluster = DebiansCluster()
    yield cluster
    cluster.remove()


def test_from_nothing_to_a_delivery_and_back(cluster: DebiansCluster, receiver: Receiver) -> None:
    before, started_at = cluster.files(), cluster.started_at()
    place = [*cluster.name, "app"]

    # Only shown.
    shown = cluster.setup("--dry-run", *place)
    assert shown.startswith("would change:") and "cron.database_name = 'app'" in shown
    assert (cluster.files(), cluster.started_at()) == (before, started_at)

    # Nobody to ask.
    unasked = cluster.try_setup(*place)
    assert unasked.returncode == 1 and "no terminal to ask on" in unasked.stderr
    assert cluster.files() == before

    said = cluster.setup("--yes", *place)
    assert "done: ulak delivers from database app" in said
    with cluster.connect("app") as db:
        db.execute("select ulak.configure('http_allowed_networks', '127.0.0.0/8')")
        db.execute("select ulak.create_endpoint('shop', 'http', %s)", [Jsonb({"url": receiver.url})])
        db.execute("select ulak.send('shop', '{}')")
    receiver.wait_for(1)

    # A second run changes nothing, and leaves the number of workers as it was set.
    with cluster.connect("app") as db:
        db.execute("select ulak.start(1)")
    changed, started_at = cluster.files(), cluster.started_at()
    assert cluster.setup(*place) == "nothing to do\n"
    assert cluster.setup("--data", str(cluster.data), "app") == "nothing to do\n"
    assert (cluster.files(), cluster.started_at()) == (changed, started_at)
    assert cluster.value("select count(*) from cron.job where jobname like 'ulak worker%'", "app") == 1

    # All its lines go, and nothing else.
    cluster.setup("--undo", "--yes", *place)
    assert cluster.files() == before
    assert cluster.value("select current_setting('shared_preload_libraries')") == ""
    assert cluster.value("select count(*) from ulak.messages", "app") == 1
    assert cluster.setup("--undo", *place) == "nothing to do\n"


def test_what_others_have_configured_is_never_overwritten(cluster: DebiansCluster) -> None:
    place = ["--yes", *cluster.name, "app"]
    original = cluster.files()

    def refuses(file: str, text: str, *reasons: str) -> None:
        (cluster.etc / file).write_text(text)
        before = cluster.files()
        done = cluster.try_setup(*place)
        after = cluster.files()
        if file in original:
            (cluster.etc / file).write_text(original[file])
        else:
            (cluster.etc / file).unlink()
        assert done.returncode == 1 and all(reason in done.stderr for reason in reasons), done.stdout + done.stderr
        assert after == before

    # Broken.
    refuses("pg_hba.conf", "lokal all all peer\n" + original["pg_hba.conf"], "has errors", "pg_hba.conf:1:")
    refuses("pg_ident.conf", "ulak postgres\n", "has errors", "pg_ident.conf:1:")
    refuses("conf.d/mine.conf", "work_mem = '17 bananas'\n", "has errors", "work_mem")
    refuses("conf.d/mine.conf", "work_mem 17 bananas\n", "mine.conf")
    # Text that would be other lines in a file of ours, or something else on a terminal.
    refuses("conf.d/mine.conf", "shared_preload_libraries = 'auto_explain\\nfsync = off'\n", "control characters")
    # What overrides a file of ours.
    refuses("conf.d/zzz.conf", "shared_preload_libraries = 'auto_explain'\n", "overrides it", "zzz.conf:1")
    assert cluster.files() == original
    refused = cluster.try_setup("--yes", cluster.name[0], "nowhere", "app")
    assert refused.returncode == 1 and "there is no cluster" in refused.stderr


def test_settings_join_those_that_are_there_and_the_restart_may_be_left(cluster: DebiansCluster) -> None:
    (cluster.etc / "conf.d" / "a.conf").write_text("shared_preload_libraries = 'auto_explain'\n")
    cluster.restart()
    started_at = cluster.started_at()

    said = cluster.setup("--yes", "--no-restart", *cluster.name, "my-app")

    assert "left to you: pg_ctlcluster" in said
    assert cluster.started_at() == started_at
    assert "shared_preload_libraries = 'auto_explain,pg_cron'" in (cluster.etc / "conf.d" / "ulak.conf").read_text()
    # The second run goes on where the first was.
    assert "done: ulak delivers" in cluster.setup("--yes", *cluster.name, "my-app")
    with cluster.connect("my-app") as db:
        assert workers_begin(db)


def test_a_cluster_by_its_path(receiver: Receiver) -> None:
    """Without conf.d and pg_ctlcluster: settings at the end of its own file, and pg_ctl."""
    cluster = bare()
    files = [cluster.data / name for name in ("postgresql.conf", "pg_hba.conf", "pg_ident.conf")]
    before = [path.read_bytes() for path in files]
    options = ["--yes", "--data", str(cluster.data), "--host", cluster.host, "--role", cluster.user, "shop"]
    try:
        said = run_setup(*options)
        assert "create database shop" in said and "done: ulak delivers from database shop" in said
        with cluster.connect("shop") as db:
            assert workers_begin(db)
        assert run_setup(*options) == "nothing to do\n"
        run_setup("--undo", *options)
        assert [path.read_bytes() for path in files] == before
    finally:
        cluster.remove()


def test_the_search_path_of_the_database_does_not_bend_it() -> None:
    """Its sessions are a superuser's, in a database that may be somebody else's."""
    cluster = bare()
    options = ["--dry-run", "--data", str(cluster.data), "--host", cluster.host, "--role", cluster.user, "shop"]
    try:
        cluster.create_database("shop")
        with cluster.connect("shop") as owner:
            owner.execute("create schema evil; create table evil.seen (who text)")
            owner.execute(
                "create function evil.note() returns name begin atomic insert into evil.seen values (user) returning who::name; end"
            )
            owner.execute("create view evil.pg_extension as select evil.note() as extname")
            owner.execute("alter database shop set search_path = evil, pg_catalog")

            said = run_setup(*options)

            assert "create extension ulak" in said
            assert owner.execute("select * from evil.seen").fetchall() == []
    finally:
        cluster.remove()


def workers_begin(db: psycopg.Connection[object]) -> bool:
    alive = "select count(*) from ulak.get_worker_status() where state = 'running'"
    return wait_until(lambda: db.execute(alive).fetchone() == (2,), "workers")
