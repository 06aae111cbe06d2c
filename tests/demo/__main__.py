"""`make demo`: workers in a private cluster deliver to receivers that are well, moody and down. `make demo-stop` ends it.

`make demo ARGS=--nodes`: two nodes deliver instead, processes outside of the server.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from support.cluster import PROJECT, WORK, Cluster, run
from support.files import write_whole
from support.sessions import wait_until

FOLDER = WORK / "demo"
DATABASE = "demo"
MESSAGES = 2000
SECONDS = 25

# Short delays, so that a minute is enough to see everything.
POLICIES: dict[str, dict[str, Any]] = {
    "shop": {},
    "partner": {"backoff": "fixed", "base_delay_seconds": 1, "jitter": "full"},
    "warehouse": {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 1},
}
BREAKER = {"threshold": 5, "cooldown": 5}

PROGRESS = """
    select
        count(*) filter (where status = 'completed'),
        count(*) filter (where status in ('pending', 'processing')),
        coalesce(sum(retry_count), 0),
        (select count(*) from ulak.dlq where status = 'failed'),
        (select string_agg(name || ' ' || circuit_state, ', ' order by name) from ulak.endpoints where circuit_state <> 'closed')
    from ulak.messages
"""


def say(line: str = "") -> None:
    print(line, flush=True)


class Progress:
    """One line that is written over and over; on something that is no terminal, a line now and then."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db
        self._shown_at = 0.0
        self._shown = ""
        self._terminal = sys.stdout.isatty()

    def show(self, last: bool = False) -> None:
        delivered, waiting, retries, dead, circuits = self._db.execute(PROGRESS).fetchone() or (0, 0, 0, 0, None)
        line = f"delivered {delivered:>5,}   waiting {waiting:>5,}   retries {retries:>4,}   dead letters {dead:>3}"
        line += f"   circuits: {circuits or 'all closed'}"
        now = time.monotonic()
        if self._terminal:
            print("\r" + line.ljust(len(self._shown)), end="\n" if last else "", flush=True)
            self._shown = "" if last else line
        elif last or now - self._shown_at > 4:
            say(line)
            self._shown_at = now


# The cluster and the receivers stay when the demo is over.


def stop() -> None:
    if not FOLDER.exists():
        say("no demo is running")
        return
    end_processes()
    Cluster(FOLDER).remove()
    say("the demo's cluster, receivers and nodes are gone")


def end_processes() -> None:
    """Receivers and nodes."""
    for file in FOLDER.glob("*.pid"):
        with suppress(FileNotFoundError, ProcessLookupError):
            pid = int(file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # The number may belong to somebody else by now.
            if b"demo.receivers" in command or b"docker/node/worker.py" in command:
                os.kill(pid, signal.SIGTERM)


def start_receivers() -> dict[str, int]:
    command = [sys.executable, "-m", "demo.receivers", str(FOLDER)]
    # It outlives us, so it must not keep our output open: a reader of `make demo` through a pipe would wait for it.
    said = FOLDER / "receivers.log"
    with said.open("w") as log:
        process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    file = FOLDER / "ports.json"
    # However busy the machine is: only their end is a reason to give up.
    wait_until(lambda: file.exists() or process.poll() is not None, "the receivers")
    if not file.exists():
        sys.exit(f"the receivers ended:\n{said.read_text()}")
    ports: dict[str, int] = json.loads(file.read_text())
    return ports


def start_cluster() -> Cluster:
    """pg_cron lives in the demo's own database."""
    cluster = Cluster.create(FOLDER, owned=False, settings={"cron.database_name": DATABASE, "fsync": "on"})
    cluster.execute(f"create database {DATABASE}")
    cluster.install(DATABASE)
    cluster.execute("create extension pg_cron", DATABASE)
    # Its scheduler found no database when the server started.
    cluster.restart()
    return cluster


def create_endpoints(db: psycopg.Connection[Any], ports: dict[str, int]) -> None:
    db.execute("select ulak.configure('http_allowed_networks', '127.0.0.1/32')")
    for name, port in ports.items():
        config = {"url": f"http://127.0.0.1:{port}/orders", "circuit_breaker": BREAKER}
        query = "select ulak.create_endpoint(%s, 'http', %s, p_retry_policy => %s)"
        db.execute(query, [name, Jsonb(config), Jsonb(POLICIES[name])])
        db.execute("select ulak.rotate_secret(%s)", [name])


def start_workers(cluster: Cluster, db: psycopg.Connection[Any]) -> None:
    for item, status, detail, fix in db.execute("select * from ulak.start()"):
        say(
            f"  {status:<10}{item}: {detail if len(detail) < 90 else detail[:87] + '...'}"
            + (f"  ->  {fix}" if fix else "")
        )
        assert status != "problem"
    for slot in (31, 32):
        session = cluster.connect(DATABASE, "ulak_worker")
        threading.Thread(target=bridge, args=(session, slot), daemon=True).start()


def start_nodes(cluster: Cluster, db: psycopg.Connection[Any]) -> None:
    """As on other machines: with the distribution's own Python, and a login that is a member of ulak_node."""
    db.execute("select ulak.start(0)")
    for n in (1, 2):
        db.execute(f"create role node_{n} login in role ulak_node")  # type: ignore[arg-type]
        command = [
            "python3",
            "docker/node/worker.py",
            "--dsn",
            cluster.dsn(DATABASE, f"node_{n}"),
            "--name",
            f"machine-{n}",
        ]
        say(f'  {" ".join(command[:3])} "{command[3]}" --name {command[5]}')
        with (FOLDER / f"node-{n}.log").open("w") as log:
            node = subprocess.Popen(
                ["/usr/bin/python3", "-B", str(PROJECT / command[1]), *command[2:]],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        write_whole(FOLDER / f"node-{n}.pid", str(node.pid))
    alive = "select count(*) from ulak.get_worker_status() where host is not null and state = 'running'"
    wait_until(lambda: db.execute(alive).fetchone() == (2,), "the nodes")


def bridge(session: psycopg.Connection[Any], slot: int) -> None:
    """pg_cron starts its jobs with the minute; until then this session runs the same procedure."""
    with suppress(psycopg.Error), session:
        session.execute("call ulak.run_worker(%s)", [slot])


def send(db: psycopg.Connection[Any], progress: Progress) -> None:
    """An order and the message about it, in one transaction each."""
    db.execute("create table orders (id bigint generated always as identity primary key, amount numeric not null)")
    chance = random.Random(3)
    began = time.monotonic()
    for n in range(MESSAGES):
        endpoint = "warehouse" if n % 200 == 100 else "partner" if chance.random() < 0.3 else "shop"
        # One order that the shop's receiver will refuse, however often it is sent.
        amount = -1 if n == 500 else round(chance.uniform(1, 100), 2)
        with db.transaction():
            order = db.execute("insert into orders (amount) values (%s) returning id", [amount]).fetchone()
            assert order is not None
            payload = "jsonb_build_object('order', %s::bigint, 'amount', %s::numeric)"
            db.execute(f"select ulak.send(%s, {payload})", ["shop" if n == 500 else endpoint, order[0], amount])
        if n % 10 == 0:
            progress.show()
            time.sleep(max(0.0, began + n * SECONDS / MESSAGES - time.monotonic()))
    with db.transaction(force_rollback=True):
        db.execute("""select ulak.send('shop', '{"order": "never placed"}')""")
    progress.show(last=True)


def wait_while(condition: str, db: psycopg.Connection[Any], progress: Progress, seconds: float) -> None:
    until = time.monotonic() + seconds
    while db.execute(f"select {condition}").fetchone() == (True,) and time.monotonic() < until:
        progress.show()
        time.sleep(0.2)
    progress.show(last=True)


def show(cluster: Cluster, title: str, query: str) -> None:
    say()
    say(title)
    say(f"  {query}")
    psql: list[str | Path] = [
        cluster.bin / "psql",
        "-X",
        "-q",
        "-P",
        "footer=off",
        "-P",
        "null=-",
        "-d",
        cluster.dsn(DATABASE),
    ]
    for line in run([*psql, "-c", query]).rstrip().splitlines():
        say("  " + line)


def start(with_nodes: bool, in_the_outage: Callable[[Cluster], object] = lambda cluster: None) -> None:
    began = time.monotonic()
    if FOLDER.exists():
        end_processes()
        Cluster(FOLDER).remove()
    say(f"starting a private PostgreSQL cluster with pg_cron and a database named {DATABASE}")
    cluster = start_cluster()
    ports = start_receivers()
    with cluster.connect(DATABASE) as db:
        create_endpoints(db, ports)
        say("endpoints: shop (well), partner (answers 503 to every seventh request or so), warehouse (down)")
        say(f"select * from ulak.start({'0' if with_nodes else ''});")
        if with_nodes:
            start_nodes(cluster, db)
        else:
            start_workers(cluster, db)
        say()
        say(f"sending {MESSAGES:,} messages, each in a transaction with its order; and one that is rolled back")
        progress = Progress(db)
        send(db, progress)

        # A circuit that is open sends one message in five seconds, to see whether the receiver is back.
        wait_while("count(*) = 0 from ulak.dlq where endpoint_name = 'warehouse'", db, progress, 20)
        show(cluster, "what could not be delivered:", "select * from ulak.dlq_summary()")
        in_the_outage(cluster)
        say()
        say("the warehouse comes up; its circuit closes with the next probe")
        (FOLDER / "warehouse-is-up").touch()
        wait_while("count(*) > 0 from ulak.endpoints where circuit_state <> 'closed'", db, progress, 20)
        (count,) = db.execute("select ulak.redrive_endpoint('warehouse')").fetchone() or (0,)
        say(f"select ulak.redrive_endpoint('warehouse');   -- {count} dead letters are sent again")
        wait_while("count(*) > 0 from ulak.queue where status in ('pending', 'processing')", db, progress, 20)
    show(
        cluster,
        "all endpoints:",
        "select endpoint, state, waiting, per_second, failed_percent, p50, p95, breaker from ulak.top",
    )
    show(
        cluster,
        "the workers:",
        "select slot, state, host, started_at::time(0), in_flight, messages_processed, error_count from ulak.get_worker_status()",
    )
    show(
        cluster,
        "what happened:",
        "select created_at::time(1) as at, event, endpoint_name from ulak.event_log where event like 'circuit.%' order by id",
    )
    show(
        cluster,
        "the order that nobody wants:",
        "select id, endpoint_name, payload, last_error from ulak.dlq where status = 'failed'",
    )
    say()
    keeper = f"the nodes go on, and write to {FOLDER}/node-1.log" if with_nodes else "pg_cron keeps the workers running"
    say(f"that took {time.monotonic() - began:.0f} s; {keeper}")
    say("look around:   " + f'psql "{cluster.dsn(DATABASE)}"')
    say("               select * from ulak.help();")
    say("remove it:     make demo-stop")


def main() -> None:
    if sys.argv[1] == "stop":
        stop()
    elif set(sys.argv[2:]) <= {"--nodes"}:
        start(with_nodes="--nodes" in sys.argv)
    else:
        sys.exit(f"unknown: {' '.join(sys.argv[2:])}. There is: --nodes")


if __name__ == "__main__":
    main()
