"""PostgreSQL's notification queue is full: every NOTIFY fails, but no send, settle or operator's call does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psycopg
import pytest
from support.cluster import Cluster, Settings, major
from support.receiver import Answer, Received, Receiver
from support.sessions import gather, wait_until
from support.site import Site
from support.world import FULL

USAGE = "select pg_notification_queue_usage()"
NOTIFY = "select pg_notify('ulak_bell', '')"
# Each takes a page of 8 kB. The texts differ, since PostgreSQL drops what a transaction says twice.
NOISE = "select count(pg_notify('noise', rpad(%s || n, 7999))) from generate_series(1, %s) n"

# Before PostgreSQL 17 it has 8 GB, which take a minute to fill.
HAS_SMALL_QUEUE = major() >= 17
pytestmark = pytest.mark.skipif(not HAS_SMALL_QUEUE and not FULL, reason="the queue has 8 GB: make chaos fills it")


@pytest.fixture
def site() -> Iterator[Site]:
    settings: Settings = {"max_notify_queue_pages": 64} if HAS_SMALL_QUEUE else {}
    cluster = Cluster.create(settings=settings)
    cluster.create_database("noisy")
    cluster.install("noisy")
    site = Site(cluster, "noisy")
    yield site
    site.end()
    cluster.remove()


def fill(site: Site, count: int) -> None:
    """By two sessions, until nothing goes in any more. That is work, and takes as long as it takes."""

    def notify(name: str) -> None:
        with site.connect() as session, suppress(psycopg.errors.ProgramLimitExceeded):
            # A statement whose notifications don't fit leaves none.
            while True:
                session.execute(NOISE, [name, count])

    gather([partial(notify, "a"), partial(notify, "b")])
    with site.connect() as session, suppress(psycopg.errors.ProgramLimitExceeded):
        while True:
            session.execute(NOISE, ["last", 1])


def moody(request: Received) -> Answer:
    return Answer(404 if request.path == "/gone" else 200)


def test_the_notification_queue_is_full(site: Site) -> None:
    with Receiver(moody) as receiver, site.connect() as sleeper, site.connect("ulak_application") as application:
        site.http("shop", receiver.url)
        site.http("gone", receiver.origin + "/gone")
        site.http("pager", receiver.url)
        site.call("subscribe", "ulak.message.dead", "pager")
        worker = site.start()
        site.wait_for_status(site.send(), "completed")
        # It listens, but receives nothing before its transaction is over: until then PostgreSQL keeps all notifications for it.
        sleeper.execute("listen noise")
        sleeper.execute("begin")
        sleeper.execute("select 1")

        fill(site, 1 if HAS_SMALL_QUEUE else 2000)

        assert site.value(USAGE) > 0.9
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            application.execute(NOTIFY)
        # The senders that woke the worker before, and many more than it asks for.
        ids = [site.send() for _ in range(40)]
        dead = site.send("gone")
        for id in ids:
            site.wait_for_status(id, "completed")
        site.wait_for_status(dead, "failed")
        wait_until(lambda: b"ulak.message.dead" in b"".join(r.body for r in receiver.requests), message="the event")
        site.configure(batch_size=100)
        site.call("alter_endpoint", "shop", {"url": receiver.url, "max_in_flight": 5})
        site.call("disable_endpoint", "shop")
        site.call("enable_endpoint", "shop")
        site.call("redrive_message", site.dead(dead)["id"])
        with site.connect("ulak_worker") as maintenance:
            maintenance.execute("call ulak.run_maintenance()")
        site.start(slot=2)
        site.wait_for_status(site.send(), "completed")
        site.db.execute("select * from ulak.stop()")
        worker.result()

        # No session holds the queue up any more, and everything is as before.
        sleeper.close()
        wait_until(lambda: site.value(USAGE) < 0.5, message="an emptied queue")
        application.execute(NOTIFY)
