"""start() on a server where nothing is ready: one answer names everything, and its fixes work as they are, pasted one after the other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from getpass import getuser
from typing import Any

import pytest
from psycopg.rows import dict_row
from support.bare_cluster import bare
from support.cluster import Cluster, run
from support.sessions import patience, wait_until

Rows = list[dict[str, Any]]
# psql shows what is longer on several lines of a terminal, and a pasted line ends at a newline.
WIDEST = 160


class Newcomer:
    """A newcomer who reads what start() says and pastes the fixes: shell commands into a shell, everything else into psql."""

    def __init__(self, cluster: Cluster, database: str = "app") -> None:
        self.cluster = cluster
        self.database = database

    def start(self, call: str = "ulak.start()") -> Rows:
        with self.cluster.connect(self.database, row_factory=dict_row) as db:
            return db.execute(f"select * from {call}").fetchall()  # type: ignore[arg-type]

    def paste(self, row: dict[str, Any]) -> None:
        fix = row["fix"]
        assert "\n" not in fix + row["detail"] and len(fix) < WIDEST and len(row["detail"]) < WIDEST
        if row["detail"].endswith("in a shell:"):
            # It may leave a server behind, which must not keep our output open.
            none = subprocess.DEVNULL
            subprocess.run(fix, shell=True, check=True, stdin=none, stdout=none, timeout=patience())
        else:
            psql = [self.cluster.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", self.cluster.dsn(self.database)]
            said = run(psql, input=fix + "\n")
            assert "ERROR" not in said and "invalid" not in said

    def paste_all(self, rows: Rows) -> None:
        for row in rows:
            if row["status"] in ("problem", "to do"):
                self.paste(row)

    def value(self, query: str, database: str | None = None) -> Any:
        with self.cluster.connect(database or self.database) as db:
            return (db.execute(query).fetchone() or [None])[0]  # type: ignore[arg-type]


def items(rows: Rows) -> list[str]:
    return [row["item"] for row in rows if row["status"] == "problem"]


@pytest.fixture
def newcomer(request: pytest.FixtureRequest) -> Iterator[Newcomer]:
    cluster = bare(getattr(request, "param", None))
    yield Newcomer(cluster)
    cluster.remove()


def waits(newcomer: Newcomer) -> bool:
    return newcomer.cluster.cron_waits_for_the_longest_job()


def test_one_answer_names_everything_and_its_fixes_lead_to_workers(newcomer: Newcomer) -> None:
    first = newcomer.start()

    login = ["cron.host", "restart", "pg_cron", "login", "login", "login"]
    rest = login if waits(newcomer) else ["mode", "restart", "pg_cron"]
    assert items(first) == ["pg_cron", "cron.database_name", *rest]
    assert (first[-1]["item"], first[-1]["status"]) == ("schedule", "not done")
    newcomer.paste_all(first)
    second = newcomer.start()
    assert items(second) == []
    wait_until(lambda: newcomer.value("select count(*) from ulak.get_worker_status() where state = 'running'") == 2)


def test_doctor_names_what_is_missing_before_there_is_an_endpoint(newcomer: Newcomer) -> None:
    with newcomer.cluster.connect("app", row_factory=dict_row) as db:
        told = db.execute("select * from ulak.doctor() where severity = 'info'").fetchall()

    assert {"endpoints", "pg_cron", "restart"} <= {row["check"] for row in told}


def test_a_fix_that_was_pasted_is_not_asked_for_again_before_the_restart(newcomer: Newcomer) -> None:
    first = newcomer.start()
    newcomer.paste_all([row for row in first if "alter system" in (row["fix"] or "")])

    (restart, *_) = [row for row in newcomer.start() if row["status"] == "problem"]

    assert restart["detail"].startswith("it is configured, but not loaded: the server reads these when it starts; as ")
    assert restart["fix"].endswith(" restart")


@pytest.mark.parametrize("newcomer", [{"shared_preload_libraries": "pg_cron"}], indirect=True)
def test_pg_cron_that_is_loaded_and_created_nowhere_is_seen(newcomer: Newcomer) -> None:
    """It wasn't put there on purpose, so it moves."""
    rows = newcomer.start()

    (home,) = [row for row in rows if row["item"] == "cron.database_name"]
    assert home["detail"] == 'pg_cron would look for its jobs in database "postgres"'
    assert home["fix"] == "alter system set cron.database_name = 'app';"
    assert rows[-1]["status"] == "not done"
    newcomer.paste_all(rows)
    assert items(newcomer.start()) == []


@pytest.mark.parametrize(
    "newcomer", [{"shared_preload_libraries": "pg_cron", "cron.database_name": "postgres"}], indirect=True
)
def test_pg_cron_that_is_not_created_where_it_lives_is_seen(newcomer: Newcomer) -> None:
    """It was put there on purpose, so it stays. doctor() promises no worker before there are jobs."""
    with newcomer.cluster.connect("app") as db:
        db.execute("select ulak.create_endpoint('shop', 'http', '{\"url\": \"https://example.com\"}')")
    rows = newcomer.start()

    (missing,) = [row for row in rows if row["item"] == "pg_cron" and row["status"] == "problem"]
    assert missing["detail"] == 'it is not created in database "postgres", where it lives'
    assert missing["fix"] == r"\c postgres \\ create extension pg_cron; \c app"
    newcomer.paste_all(rows)
    again = newcomer.start()
    assert items(again) == []
    (todo,) = [row for row in again if row["status"] == "to do"]
    finding = """select severity || ': ' || finding from ulak.doctor() where "check" = 'workers'"""
    promised = (
        "critical: no worker is alive, though start() was called: its jobs have to be created where pg_cron lives"
    )
    assert newcomer.value(finding) == promised
    newcomer.paste(todo)
    assert newcomer.value("select count(*) from cron.job where jobname like '%worker % in app'", "postgres") == 2
    (unscheduled, *_) = newcomer.start("ulak.stop()")
    newcomer.paste(unscheduled)
    assert newcomer.value("select count(*) from cron.job", "postgres") == 0


@pytest.mark.parametrize(
    "newcomer", [{"shared_preload_libraries": "pg_cron", "cron.database_name": "gone"}], indirect=True
)
def test_a_home_of_pg_cron_that_does_not_exist_is_seen(newcomer: Newcomer) -> None:
    rows = newcomer.start()

    (home,) = [row for row in rows if row["item"] == "cron.database_name"]
    assert home["detail"] == 'pg_cron looks for its jobs in database "gone", which does not exist'
    newcomer.paste_all(rows)
    assert items(newcomer.start()) == []


def test_a_line_of_pg_hba_conf_is_added_above_all_others(newcomer: Newcomer) -> None:
    if not waits(newcomer):
        pytest.skip("background workers need no login")
    newcomer.paste_all(newcomer.start())

    hba = (newcomer.cluster.data / "pg_hba.conf").read_text().splitlines()
    assert hba == ["local app ulak_worker peer map=ulak", "local all postgres trust", "local all all peer"]
    assert (newcomer.cluster.data / "pg_ident.conf").read_text().splitlines()[-1] == f"ulak {getuser()} ulak_worker"
