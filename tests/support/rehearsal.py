"""A pg_cron that is set up wrongly in every way before it works, and traffic over its minutes."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing
from dataclasses import dataclass, field
from getpass import getuser
from typing import Any

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from support.cluster import Cluster, tail
from support.fixes import paste, setup_command, try_setup
from support.hostile import Hostile, never_answers
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import LONGEST_TIMEOUT, Site
from support.traffic import BREATH

Rows = list[dict[str, Any]]
JOBS = "select jobname, command, username, database from cron.job order by jobname"


@dataclass
class Rehearsal:
    """A cluster whose pg_cron was set up wrongly in every way before it worked, and what start() said each time."""

    cluster: Cluster
    reports: dict[str, Rows] = field(default_factory=dict)
    # What ulak-setup said to it.
    said: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)

    def wanted_jobs(self, workers: int) -> list[str]:
        """What they do. Before pg_cron knew schedules in seconds, a watcher was needed, and something to start it."""
        watching = ["reboot", "watcher"] if self.cluster.cron_waits_for_the_longest_job() else []
        return sorted(["log", "maintenance", "vacuum", *watching, *(f"worker {n + 1}" for n in range(workers))])

    def ask(self, query: str, database: str = "shop") -> Rows:
        with self.cluster.connect(database, row_factory=dict_row) as db:
            return db.execute(query).fetchall()  # type: ignore[arg-type]

    def start(self, name: str, query: str = "select * from ulak.start()", database: str = "shop") -> None:
        self.reports[name] = self.ask(query, database)
        with self.cluster.connect("shop") as db:
            has_jobs = db.execute("select to_regclass('cron.job')").fetchone() != (None,)
            self.jobs[name] = db.execute(JOBS).fetchall() if has_jobs else []

    def problems(self, name: str, item: str) -> Rows:
        return [row for row in self.reports[name] if row["status"] == "problem" and row["item"] == item]

    def problem(self, name: str, item: str) -> dict[str, Any]:
        """The first one: others may only be fixable after it."""
        return self.problems(name, item)[0]

    @property
    def command(self) -> str:
        return setup_command(self.cluster, "shop")

    def as_psql(self, fix: str, database: str = "shop") -> str:
        return paste(self.cluster, database, fix)

    def run_setup(self, name: str, fix: str, *options: str) -> None:
        done = try_setup(self.cluster, fix, *options)
        self.said[name] = done.stdout + done.stderr

    def reload_until(self, name: str, detail: str) -> None:
        """Until this is the first thing that keeps a login from working."""
        self.cluster.reload()

        def answer() -> Rows:
            rows = self.ask("select * from ulak_private.check_login()")
            return rows if detail in rows[0]["detail"] else []

        self.reports[name] = wait_until(answer, detail)

    def fix(self, name: str, item: str) -> None:
        self.as_psql(self.problem(name, item)["fix"])


class Traffic:
    """A message every few hundredths of a second, and when each arrived."""

    def __init__(self, cluster: Cluster) -> None:
        self.receiver = Receiver()
        self._over = threading.Event()
        self._db = cluster.connect("shop")
        self._db.execute("select ulak.configure('http_allowed_networks', '127.0.0.0/8')")
        config = Jsonb({"url": self.receiver.url})
        self._db.execute("select ulak.create_endpoint('shop', 'http', %s)", [config])
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        for n in itertools.count():
            if n == 100:
                # pg_cron may have slept through all that the rehearsal did at once.
                self._db.execute("select ulak.start()")
            self._db.execute("select ulak.send('shop', jsonb_build_object('n', %s::int))", [n])
            if self._over.wait(BREATH):
                return

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._db.close()


def stop_a_busy_worker(cluster: Cluster) -> Rows:
    """Where background workers run the jobs: what stop() has come to before it unschedules anything."""
    cluster.install(cluster.create_database("busy"))
    with Hostile(never_answers) as hanging, closing(Site(cluster, "busy")) as site:
        site.http("hanging", hanging.url, timeout=LONGEST_TIMEOUT)
        site.begin(1, is_scheduled=True)
        site.send_many(3, "hanging")
        wait_until(lambda: site.value("select count(*) = 3 from ulak.queue where status = 'processing'"), "3 in flight")
        with site.connect(autocommit=False) as administrator:
            administrator.execute("select ulak.stop()")
            return site.rows("select w.state, q.status, q.retry_count from ulak.workers w cross join ulak.queue q")


def rehearse() -> Rehearsal:
    """Ends with two workers scheduled. An error of it tells what the server says."""
    settings: dict[str, Any] = {
        "shared_preload_libraries": "auto_explain",
        "cron.database_name": "shop",
        "cron.max_running_jobs": 4,
        "cron.use_background_workers": True,
    }
    seen = Rehearsal(Cluster.create(settings=settings, in_memory=True))
    try:
        _rehearse(seen)
    except Exception as error:
        error.add_note(tail(seen.cluster.log))
        seen.cluster.remove()
        raise
    return seen


def _rehearse(seen: Rehearsal) -> None:
    cluster = seen.cluster
    cluster.install(cluster.create_database("shop"))
    seen.start("not loaded")

    cluster.configure({"shared_preload_libraries": "pg_cron"})
    cluster.restart()
    seen.start("not created")
    seen.fix("not created", "pg_cron")
    # Seven jobs: as many as the setting may be, and too many for background workers.
    seen.start("limits", f"select * from ulak.start({3 if cluster.cron_waits_for_the_longest_job() else 4})")

    seen.reports["a busy worker"] = stop_a_busy_worker(cluster)

    # Its restart is left to us, and so is what comes after it: nothing is scheduled yet.
    seen.run_setup("limits", seen.problem("limits", "max_running_jobs")["fix"], "--yes", "--no-restart")
    if not cluster.cron_waits_for_the_longest_job():
        cluster.execute("alter system set cron.use_background_workers = off")
    hba = cluster.data / "pg_hba.conf"
    trusting = hba.read_text()
    hba.write_text("local all ulak_worker reject\n" + trusting)
    cluster.restart()
    seen.start("no entry")
    seen.run_setup("no entry", seen.problem("no entry", "login")["fix"], "--yes")

    # As Debian has it: the operating system's user may log in under its own name only.
    own = f"local all {cluster.user} trust\n"
    hba.write_text(f"{own}local all all peer\n")
    seen.reload_until("no map", "Peer authentication failed")
    seen.run_setup("no map", seen.problem("no map", "login")["fix"], "--dry-run")
    peer = f"{own}local shop ulak_worker peer map=ulak\nlocal all all peer\n"
    hba.write_text(peer)
    seen.run_setup("empty map", seen.command, "--dry-run")
    (cluster.data / "pg_ident.conf").write_text(f"ulak {getuser()} ulak_worker\n")
    seen.reload_until("mapped", "ulak_worker can log in")
    hba.write_text(trusting)
    cluster.execute("alter role ulak_worker nologin")
    seen.reload_until("forbidden", 'role "ulak_worker" is not permitted to log in')
    seen.start("no login")
    seen.fix("no login", "login")
    cluster.execute("alter database shop set statement_timeout = '20s'")

    seen.start("three", "select * from ulak.start(3)")
    seen.start("three again", "select * from ulak.start(3)")
    seen.start("two", "select * from ulak.start()")
    cluster.install(cluster.create_database("other"))
    seen.start("elsewhere", database="other")
