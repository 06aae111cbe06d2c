"""start() on a server where nothing is ready: it names what is wrong, and one command puts it right."""

from __future__ import annotations

from collections.abc import Iterator
from getpass import getuser
from typing import Any

import pytest
from psycopg.rows import dict_row
from support.bare_cluster import bare
from support.cluster import Cluster
from support.fixes import paste, setup_command, try_setup
from support.sessions import wait_until

Rows = list[dict[str, Any]]
# psql shows what is longer on several lines of a terminal, and a pasted line ends at a newline.
WIDEST = 160
LAUNCHER = "select pid from pg_stat_activity where backend_type = 'pg_cron launcher'"
# Also where pg_cron could use background workers, which need no login.
LOGINS = {"cron.use_background_workers": False}


class Newcomer:
    """Does what start() says: SQL in psql, everything else in a shell."""

    def __init__(self, cluster: Cluster, database: str = "app") -> None:
        self.cluster = cluster
        self.database = database
        self.command = setup_command(cluster, database)

    def start(self, call: str = "ulak.start()") -> Rows:
        with self.cluster.connect(self.database, row_factory=dict_row) as db:
            return db.execute(f"select * from {call}").fetchall()  # type: ignore[arg-type]

    def paste(self, fix: str) -> str:
        return paste(self.cluster, self.database, fix)

    def mend(self, rows: Rows) -> str:
        """One command is enough, however many rows name it."""
        told = [row for row in rows if row["status"] == "problem"]
        (fix,) = {row["fix"] for row in told}
        assert all("\n" not in row["detail"] and len(row["detail"]) < WIDEST for row in told) and len(fix) < WIDEST
        return self.paste(fix)

    def value(self, query: str, database: str | None = None) -> Any:
        with self.cluster.connect(database or self.database) as db:
            return (db.execute(query).fetchone() or [None])[0]  # type: ignore[arg-type]

    def workers(self) -> int:
        return int(self.value("select count(*) from ulak.get_worker_status() where state = 'running'"))


def problems(rows: Rows) -> list[tuple[str, str]]:
    return [(row["item"], row["detail"]) for row in rows if row["status"] == "problem"]


@pytest.fixture
def newcomer(request: pytest.FixtureRequest) -> Iterator[Newcomer]:
    cluster = bare(getattr(request, "param", None))
    yield Newcomer(cluster)
    cluster.remove()


def test_one_command_leads_to_workers_and_brings_a_dead_scheduler_back(newcomer: Newcomer) -> None:
    first = newcomer.start()

    assert problems(first) == [("pg_cron", "it is not loaded")]
    assert (first[-1]["item"], first[-1]["status"]) == ("schedule", "not done")
    assert [row["fix"] for row in first if row["item"] == "pg_cron"] == [newcomer.command]
    assert "done: ulak delivers from database app" in newcomer.mend(first)
    assert problems(newcomer.start()) == []
    wait_until(lambda: newcomer.workers() == 2)
    assert newcomer.paste(newcomer.command) == "nothing to do\n"

    if not newcomer.cluster.cron_waits_for_the_longest_job():
        # Later versions of it come back by themselves.
        return
    newcomer.value(f"select pg_terminate_backend(pid) from ({LAUNCHER}) l")
    wait_until(lambda: newcomer.value(LAUNCHER) is None)
    dead = newcomer.start()
    assert problems(dead) == [("pg_cron", "its scheduler is not running")]
    newcomer.mend(dead)
    assert problems(newcomer.start()) == []


def test_doctor_names_what_is_missing_before_there_is_an_endpoint(newcomer: Newcomer) -> None:
    with newcomer.cluster.connect("app", row_factory=dict_row) as db:
        told = db.execute("""select "check", fix from ulak.doctor() where severity = 'info'""").fetchall()

    assert {row["check"]: row["fix"] for row in told}.keys() == {"endpoints", "pg_cron"}
    assert newcomer.command in [row["fix"] for row in told]


@pytest.mark.parametrize("newcomer", [{"cron.max_running_jobs": 4}], indirect=True)
def test_the_number_of_workers_is_part_of_the_command(newcomer: Newcomer) -> None:
    rows = newcomer.start("ulak.start(3)")

    assert rows[-2]["fix"] == f"{newcomer.command} --workers 3"
    newcomer.mend(rows)
    assert problems(newcomer.start("ulak.start(3)")) == []
    wait_until(lambda: newcomer.workers() == 3)


@pytest.mark.parametrize("newcomer", [{"shared_preload_libraries": "pg_cron"}], indirect=True)
def test_pg_cron_that_is_loaded_and_created_nowhere_moves(newcomer: Newcomer) -> None:
    """It wasn't put into database postgres on purpose."""
    rows = newcomer.start()

    assert ("pg_cron", "ok", 'in database "postgres"') in [(row["item"], row["status"], row["detail"]) for row in rows]
    # It would log in by TCP, and the server doesn't listen.
    assert {item for item, _ in problems(rows)} == {"login"}
    assert rows[-1]["status"] == "not done"
    newcomer.mend(rows)
    assert problems(newcomer.start()) == []
    assert newcomer.value("select current_setting('cron.database_name')") == "app"


@pytest.mark.parametrize(
    ("newcomer", "is_created"),
    [
        ({"shared_preload_libraries": "pg_cron"}, True),
        ({"shared_preload_libraries": "pg_cron", "cron.database_name": "postgres"}, False),
    ],
    indirect=["newcomer"],
    ids=["created there", "named"],
)
def test_pg_cron_that_lives_elsewhere_stays_there_and_serves(newcomer: Newcomer, is_created: bool) -> None:
    """doctor() promises no worker before there are jobs."""
    jobs = "select count(*) from cron.job where jobname like 'ulak worker _ in app'"
    if is_created:
        newcomer.cluster.execute("create extension pg_cron")
    with newcomer.cluster.connect("app") as db:
        db.execute("select ulak.create_endpoint('shop', 'http', '{\"url\": \"https://example.com\"}')")

    said = newcomer.mend(newcomer.start())

    assert 'its jobs are in database "postgres"' in said
    assert newcomer.value(jobs, "postgres") == 2
    assert newcomer.value("select current_setting('cron.database_name')") == "postgres"
    assert newcomer.paste(newcomer.command) == "nothing to do\n"
    # By hand.
    wait_until(lambda: newcomer.workers() == 2)
    (unscheduled, *_) = newcomer.start("ulak.stop()")
    newcomer.paste(unscheduled["fix"])
    assert newcomer.value("select count(*) from cron.job", "postgres") == 0
    finding = """select severity || ': ' || finding from ulak.doctor() where "check" = 'workers'"""
    promised = (
        "critical: no worker is alive, though start() was called: its jobs have to be created where pg_cron lives"
    )

    def is_promised() -> bool:
        """pg_cron may have started a last run meanwhile."""
        newcomer.start("ulak.stop()")
        if newcomer.workers() > 0:
            return False
        newcomer.start()
        return str(newcomer.value(finding)).startswith(promised)

    wait_until(is_promised)
    again = newcomer.start()
    assert problems(again) == []
    (todo,) = [row for row in again if row["status"] == "to do"]
    newcomer.paste(todo["fix"])
    assert newcomer.value(jobs, "postgres") == 2


@pytest.mark.parametrize(
    "newcomer", [{"shared_preload_libraries": "pg_cron", "cron.database_name": "gone"}], indirect=True
)
def test_a_home_of_pg_cron_that_does_not_exist_is_replaced(newcomer: Newcomer) -> None:
    rows = newcomer.start()

    detail = 'pg_cron looks for its jobs in database "gone", which does not exist'
    assert ("cron.database_name", detail) in problems(rows)
    newcomer.mend(rows)
    assert problems(newcomer.start()) == []


@pytest.mark.parametrize("newcomer", [LOGINS], indirect=True)
def test_the_lines_of_a_login_go_above_all_others_and_come_back_when_they_are_lost(newcomer: Newcomer) -> None:
    hba, ident = (newcomer.cluster.data / name for name in ("pg_hba.conf", "pg_ident.conf"))
    unmapped = f'map "ulak" has no line that lets {getuser()} in as ulak_worker'

    said = newcomer.mend(newcomer.start())

    assert f"# {hba}:2 decides: local all all peer" in said and unmapped in said
    assert hba.read_text().splitlines() == [
        "# ulak-setup: begin",
        "local   app   ulak_worker   peer map=ulak",
        "# ulak-setup: end",
        "local all postgres trust",
        "local all all peer",
    ]
    mapped = ident.read_text()
    assert mapped.splitlines()[-2] == f"ulak   {getuser()}   ulak_worker"

    # A map without its line, and then a file that is right, but that the server hasn't read.
    ident.write_text("")
    newcomer.cluster.reload()
    lost = wait_until(lambda: [row for row in newcomer.start() if row["status"] == "problem"])
    assert [row["detail"] for row in lost] == [
        'ulak_worker can\'t log in: Peer authentication failed for user "ulak_worker"'
    ]
    ident.write_text(mapped)
    assert "select pg_reload_conf()" in newcomer.mend(lost)
    assert problems(newcomer.start()) == []
    ident.write_text("")
    newcomer.cluster.reload()
    lost = wait_until(lambda: [row for row in newcomer.start() if row["status"] == "problem"])
    said = newcomer.mend(lost)
    assert unmapped in said and "pg_hba.conf" not in said
    assert problems(newcomer.start()) == []


@pytest.mark.parametrize("newcomer", [LOGINS], indirect=True)
def test_the_line_that_decides_is_found_as_the_server_finds_it(newcomer: Newcomer) -> None:
    hba = newcomer.cluster.data / "pg_hba.conf"
    newcomer.cluster.execute("create role team; create role guests; grant team to ulak_worker")
    original = hba.read_text()

    def deciding(first: str) -> str:
        hba.write_text(f"{first}\n{original}")
        said = try_setup(newcomer.cluster, newcomer.command, "--dry-run").stdout
        return said.partition(f"# {hba}:")[2].partition(" ")[0]

    own = [
        "local all +team peer",
        "local app +ulak_worker,guests peer",
    ]
    others = [
        "local sameuser,samerole all peer",
        "local replication all peer",
        "local all +guests peer",
        "host all all 127.0.0.1/32 trust",
    ]
    # Before PostgreSQL 16 these are names.
    with newcomer.cluster.connect() as db:
        patterns = ["local /^ap all peer", "local all /^ulak_w peer"] if db.info.server_version >= 160000 else []
    assert [deciding(line) for line in [*own, *patterns]] == ["1"] * len([*own, *patterns])
    assert [deciding(line) for line in others] == ["3"] * len(others)


@pytest.mark.parametrize("newcomer", [LOGINS], indirect=True)
def test_the_owner_can_log_in_as_its_jobs_do_and_as_before(newcomer: Newcomer) -> None:
    """Vacuum runs as the role that owns the extension. Its people's own way in stays; a password is left to them."""
    hba = newcomer.cluster.data / "pg_hba.conf"
    newcomer.cluster.execute("create role boss superuser login")
    newcomer.cluster.execute(
        "drop extension ulak; set ulak.accept_roles = on; set role boss; create extension ulak", "app"
    )
    original = hba.read_text()
    hba.write_text(f"local all boss scram-sha-256\n{original}")
    before = hba.read_text()
    refused = try_setup(newcomer.cluster, newcomer.command)
    assert refused.returncode == 1 and hba.read_text() == before
    assert f"{hba}:1 says scram-sha-256, so pg_cron can't log in as boss: local all boss scram" in refused.stderr
    hba.write_text(original)

    newcomer.mend(newcomer.start())

    rows = newcomer.start()
    assert problems(rows) == []
    assert [row["detail"] for row in rows if row["item"] == "login"] == [
        "ulak_worker can log in",
        "boss can log in",
    ]
    mapped = (newcomer.cluster.data / "pg_ident.conf").read_text().splitlines()
    assert {f"ulak   {getuser()}   boss", "ulak   boss   boss"} <= set(mapped)
