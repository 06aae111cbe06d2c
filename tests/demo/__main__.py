"""`make demo`: a private cluster, an endpoint and messages on their way, left running. `make demo-stop` removes it."""

from __future__ import annotations

import sys
import time
from typing import Any

import psycopg
from support.cluster import WORK, Cluster

FOLDER = WORK / "demo"
DATABASE = "demo"
MESSAGES = 2000

COUNTS = """
    select e.name, q.status, count(*)
    from ulak.queue q
    join ulak.endpoints e on e.id = q.endpoint_id
    group by 1, 2
    order by 1, 2
"""


def say(line: str = "") -> None:
    print(line, flush=True)


def stop() -> None:
    if FOLDER.exists():
        Cluster(FOLDER).remove()
        say("the demo's cluster is gone")
    else:
        say("no demo is running")


def create_endpoints(db: psycopg.Connection[Any]) -> None:
    db.execute("""select ulak.create_endpoint('orders', 'http', '{"url": "https://example.com/orders"}')""")


def send(db: psycopg.Connection[Any]) -> None:
    """An order and the message about it, in one transaction each."""
    db.execute("create table orders (id bigint generated always as identity primary key, amount numeric not null)")
    started = time.monotonic()
    for _ in range(MESSAGES):
        with db.transaction():
            order = db.execute("insert into orders (amount) values (random() * 100) returning id").fetchone()
            assert order is not None
            db.execute("select ulak.send('orders', jsonb_build_object('order', %s::bigint))", [order[0]])
    say(f"sent {MESSAGES:,} messages, one per transaction, in {time.monotonic() - started:.1f} s")


def roll_back(db: psycopg.Connection[Any]) -> None:
    with db.transaction(force_rollback=True):
        db.execute("""select ulak.send('orders', '{"order": "never placed"}')""")
    say("sent one more and rolled back: it was never there")


def start() -> None:
    if FOLDER.exists():
        Cluster(FOLDER).remove()
    say("starting a private PostgreSQL cluster")
    cluster = Cluster.create(FOLDER, owned=False)
    cluster.create_database(DATABASE)
    cluster.install(DATABASE)
    with cluster.connect(DATABASE) as db:
        create_endpoints(db)
        send(db)
        roll_back(db)
        say()
        say(f"{'endpoint':<12}{'status':<12}{'messages':>10}")
        for endpoint, status, count in db.execute(COUNTS):
            say(f"{endpoint:<12}{status:<12}{count:>10,}")
    say()
    say("look around:   " + f'psql "{cluster.dsn(DATABASE)}"')
    say("remove it:     make demo-stop")


def main() -> None:
    {"start": start, "stop": stop}[sys.argv[1]]()


if __name__ == "__main__":
    main()
