"""The guide's senders and receivers run as they are printed, in every language, and through PgBouncer."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import PROJECT, Cluster
from support.ports import start_on_free_port
from support.programs import start_program
from support.sessions import patience
from support.site import Site
from worker.test_readme import program, takes_each_message_once_and_no_forgery

# Debian's own interpreters: the virtual environment's has other drivers.
PYTHON = "/usr/bin/python3"
SENDERS = {
    "send.py": ("python", [PYTHON]),
    "send.js": ("js", ["node"]),
    "send.go": ("go", ["go", "run"]),
    "Send.java": ("java", ["java", "-cp", "/usr/share/java/postgresql.jar"]),
    "send.rb": ("ruby", ["ruby"]),
    "send.php": ("php", ["php"]),
}


def environment(cluster: Cluster, database: str, folder: Path, port: int | None = None) -> dict[str, str]:
    """Where libpq and its likes find the database: by a socket, or at this port of loopback."""
    return {
        **os.environ,
        "PGHOST": "127.0.0.1" if port else cluster.host,
        "PGPORT": str(port or cluster.port),
        "PGUSER": "test_ulak_application",
        "PGDATABASE": database,
        "PGSSLMODE": "disable",
        "JDBC_URL": f"jdbc:postgresql://127.0.0.1:{port or cluster.port}/{database}?user=test_ulak_application",
        "NODE_PATH": str(Path(os.environ["ULAK_WORK"]).parent / "tools/usr/share/nodejs"),
        # Debian's packages of Go's libraries; nothing is fetched.
        "GO111MODULE": "off",
        "GOPATH": "/usr/share/gocode",
        "GOCACHE": str(folder / "go"),
        "GOFLAGS": "-p=1",
    }


@pytest.fixture
def shop(site: Site) -> Iterator[Site]:
    site.http("orders", "http://127.0.0.1:9/hooks")
    site.db.execute("create table orders (id bigint primary key, state text)")
    site.db.execute("grant select, insert on orders to ulak_application")
    yield site
    site.db.execute("drop table orders")


def run_program(shop: Site, folder: Path, language: str, name: str, command: list[str], **options: Any) -> str:
    (folder / name).write_text(program(language, name))
    done = subprocess.run(
        [*command, str(folder / name)],
        env=environment(shop.cluster, shop.database, folder, **options),
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sent(shop: Site) -> dict[str, Any]:
    """The only message."""
    query = """
        select m.id, m.payload, m.correlation_id, m.scheduled_at - m.created_at as delay, o.id as order, o.state
        from ulak.queue m cross join orders o
    """
    (row,) = shop.rows(query)
    return row


@pytest.mark.parametrize("name", SENDERS)
def test_a_sender_of_the_guide_stores_an_order_and_its_message(shop: Site, tmp_path: Path, name: str) -> None:
    language, command = SENDERS[name]

    printed = run_program(shop, tmp_path, language, name, command)

    row = sent(shop)
    assert printed == f"message {row['id']}"
    assert row["payload"] == {"order": row["order"]}
    assert row["state"] == "paid"
    assert row["correlation_id"] is not None
    assert row["delay"].total_seconds() == 300


def test_an_orm_sends_in_its_transaction(shop: Site, tmp_path: Path) -> None:
    printed = run_program(shop, tmp_path, "python", "orm.py", [PYTHON])

    row = sent(shop)
    assert printed == f"message {row['id']}"
    assert row["payload"] == {"order": row["order"]} == {"order": 7}


MIGRATIONS = {
    "migration.py": """
        import sqlalchemy, migration
        from alembic.migration import MigrationContext
        from alembic.operations import Operations

        engine = sqlalchemy.create_engine("postgresql://")
        with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
            migration.upgrade()
    """,
    "migrate.py": """
        import os, django
        from django.conf import settings

        database = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}
        settings.configure(DATABASES={"default": database})
        django.setup()
        from django.db import connection, migrations
        from django.db.migrations.state import ProjectState
        import migrate

        with connection.schema_editor(atomic=True) as editor:
            migrate.Migration("0001", "shop").apply(ProjectState(), editor)
    """,
}


@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_migration_of_the_guide_applies_the_document(site: Site, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(program("python", name))
    (tmp_path / "run.py").write_text(textwrap.dedent(MIGRATIONS[name]))
    (tmp_path / "ulak.json").write_text('{"endpoints": {"100% ours": {"protocol": "pull"}}}')
    variables = {**environment(site.cluster, site.database, tmp_path), "PGUSER": "test_ulak_admin"}

    done = subprocess.run([PYTHON, "run.py"], cwd=tmp_path, env=variables, text=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    assert site.column("select name from ulak.endpoints") == ["100% ours"]


def test_an_application_whose_queue_is_full_stores_nothing_and_says_that_it_is_busy(shop: Site, tmp_path: Path) -> None:
    shop.configure(max_queue_size=1)
    shop.send("orders", {"order": 1})

    told = run_program(shop, tmp_path, "python", "busy.py", [PYTHON])
    stored = shop.value("select count(*) from orders")
    shop.configure(max_queue_size=None)

    assert (told, stored) == ("busy", 0)
    assert run_program(shop, tmp_path, "python", "busy.py", [PYTHON]) == "stored"
    assert shop.value("select count(*) from orders") == 1


@pytest.mark.parametrize("name", ["send.js", "send.php", "Send.java"])
def test_a_sender_works_through_a_pool_of_transactions(shop: Site, tmp_path: Path, name: str) -> None:
    settings = f"""
        [databases]
        * = host={shop.cluster.host} port={shop.cluster.port}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = PORT
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        ignore_startup_parameters = extra_float_digits
    """
    # It doesn't ask for a role: everybody is the application.
    settings = settings.replace("* = host", f"{shop.database} = user=test_ulak_application host")
    file, log = tmp_path / "pgbouncer.ini", tmp_path / "log"

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        file.write_text(re.sub(r"^ +", "", settings.replace("PORT", str(port)), flags=re.MULTILINE))
        return start_program(["pgbouncer", file], log, lambda: "process up" in log.read_text()), port

    pooler, port = start_on_free_port(start)
    try:
        language, command = SENDERS[name]
        run_program(shop, tmp_path, language, name, command, port=port)

        row = sent(shop)
        assert row["payload"] == {"order": row["order"]}
    finally:
        pooler.terminate()
        pooler.wait()


@pytest.mark.parametrize("name", ["receiver.go", "receiver.php"])
def test_a_receiver_of_the_guide_takes_each_message_once_and_no_forgery(
    site: Site, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith(".php"):
        (tmp_path / name).write_text(program("php", name))
        takes_each_message_once_and_no_forgery(site, tmp_path, lambda port: ["php", "-S", f"127.0.0.1:{port}", name])
    else:
        (tmp_path / name).write_text(program("go", name))
        variables = environment(site.cluster, site.database, tmp_path)
        # Built before: what `go run` starts would outlive it.
        subprocess.run(["go", "build", "-o", "receiver", name], cwd=tmp_path, env=variables, check=True)
        takes_each_message_once_and_no_forgery(site, tmp_path, lambda port: [str(tmp_path / "receiver")])


def test_every_driver_of_the_guides_table_has_a_program() -> None:
    guide = (PROJECT / "sql/GUIDE.md").read_text()
    table = guide[guide.index("| driver | jsonb |") :].split("\n\n")[0]

    assert len(table.splitlines()) - 2 == len(SENDERS)


def test_the_runbooks_consumer_in_node_works_off_what_waits_and_what_is_sent_while_it_sleeps(
    site: Site, tmp_path: Path
) -> None:
    runbook = (PROJECT / "docker" / "OPERATIONS.md").read_text()
    found = re.search(r"^```js\n(// consumer.js: .*?)^```$", runbook, re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "consumer.js").write_text(found[1])
    (tmp_path / "main.js").write_text("""
        const { work } = require('./consumer.js')
        const stop = new AbortController()
        work({}, 'jobs', async message => {
          if (message.payload.n === 'wrong') throw new RangeError('no such customer')
          if (message.payload.n === 'last') stop.abort()
        }, stop.signal).then(() => console.log('stopped'))
    """)
    site.db.execute("select ulak.create_endpoint('jobs', 'pull', '{}')")
    site.db.execute("select ulak.grant_endpoint('jobs', 'test_ulak_consumer')")
    wrong = site.send("jobs", {"n": "wrong"})
    ids = [site.send("jobs", {"n": n}) for n in range(30)]
    given = environment(site.cluster, site.database, tmp_path) | {"PGUSER": "test_ulak_consumer"}

    with subprocess.Popen(
        ["node", str(tmp_path / "main.js")], env=given, stdout=subprocess.PIPE, text=True
    ) as consumer:
        for id in ids:
            site.wait_for_status(id, "completed")
        last = site.send("jobs", {"n": "last"})
        site.wait_for_status(last, "completed")
        told, _ = consumer.communicate(timeout=patience())

    assert told == "stopped\n"
    assert site.value("select last_error from ulak.dlq where original_message_id = %s", wrong) == (
        "[PERMANENT] no such customer"
    )
