"""Messages that come one by one: the worker sleeps until a sender wakes it. Here it hardly does anything else: its looks are an hour apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from psycopg import Notify
from support.cluster import Cluster
from support.defects import install_defect
from support.hostile import Hostile, never_answers
from support.receiver import Receiver
from support.sessions import wait_until, wait_until_idle
from support.site import LONGEST_TIMEOUT, Site, WorkerSession

# While nothing waits, the worker looks once in this time, and asks once whether to leave. Traffic doesn't make it look more often.
LAST = "STOP_SECONDS = 2.0\n"
SELDOM = "BUSY_SECONDS = 0.0\nLOOK_SECONDS_EMPTY = CHECK_SECONDS_LISTENING = 3600.0\n"
# Without wake-ups the worker polls after poll_interval, which is a minute at most. A hundred minutes are longer than any patience.
PACE = 'poll_interval=int(settings["poll_interval"]) / 1000'
SLOW_PACE = 'poll_interval=int(settings["poll_interval"]) / 10'


@pytest.fixture(scope="module")
def sleepy_database(cluster: Cluster, module_database: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sleepy")
    with cluster.connect(module_database) as db:
        install_defect(db, folder, "worker/tuning.py", LAST, LAST + SELDOM)
        install_defect(db, folder, "worker/options.py", PACE, SLOW_PACE)
    return module_database


@pytest.fixture
def site(cluster: Cluster, sleepy_database: str) -> Iterator[Site]:
    with closing(Site(cluster, sleepy_database)) as site:
        yield site


def asleep(site: Site, receiver: Receiver, **settings: int) -> WorkerSession:
    """A worker that listens and does nothing else."""
    site.http("shop", receiver.url)
    site.configure(**({"poll_interval": 60000} | settings))
    return start_listening(site)


def start_listening(site: Site) -> WorkerSession:
    site.db.execute("select setval('ulak_private.bell', 1, false)")
    worker = site.start()
    wait_until(
        lambda: site.value("select pg_sequence_last_value('ulak_private.bell')"), message="a worker that listens"
    )
    # Its first look and its first check still come, and its next report after both.
    reported_at = site.worker_row(worker)["heartbeat_at"]
    wait_until(lambda: site.worker_row(worker)["heartbeat_at"] > reported_at, "another report")
    return worker


def send_one(site: Site, receiver: Receiver) -> None:
    """Returns when it has arrived."""
    before = len(receiver.requests)
    site.send()
    receiver.wait_for(before + 1)


def wait_until_stored(site: Site, count: int) -> None:
    stored = "select count(*) = %s from ulak.messages where status = 'completed'"
    wait_until(lambda: site.value(stored, count), f"{count} outcomes")


def test_a_message_wakes_the_worker(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)

    for _ in range(20):
        send_one(site, receiver)
        site.wait_until_settled()

    assert site.value("select count(*) from ulak.messages where status = 'completed' and attempts = 1") == 20


def test_a_message_wakes_it_while_another_is_under_way(site: Site, receiver: Receiver) -> None:
    with Hostile(never_answers) as slow:
        asleep(site, receiver)
        site.http("slow", slow.url, timeout=LONGEST_TIMEOUT)
        site.send("slow")
        wait_until(lambda: slow.connections)

        for number in range(1, 21):
            send_one(site, receiver)
            wait_until_stored(site, number)


def test_a_sender_that_stays_in_its_transaction_wakes_it_by_its_commit(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)
    with site.connect(autocommit=False) as sender:
        sender.execute("select ulak.send('shop', '{}')")
        # Others draw their ids and are delivered meanwhile, until wake-ups are asked for again.
        for _ in range(20):
            send_one(site, receiver)

        sender.commit()

    receiver.wait_for(21)


def test_many_messages_of_one_transaction_are_all_claimed_after_one_wake_up(site: Site, receiver: Receiver) -> None:
    with Hostile(never_answers) as slow:
        # While no outcome is stored, only claims find more messages.
        site.http("slow", slow.url, timeout=LONGEST_TIMEOUT)
        asleep(site, receiver, worker_concurrency=200)
        send_one(site, receiver)
        site.wait_until_settled()

        site.db.execute("select ulak.send('slow', '{}') from generate_series(1, 40)")

        claimed = "select not exists (select from ulak.queue where status = 'pending')"
        wait_until(lambda: site.value(claimed), "a claim of all of them")


def test_outcomes_are_stored_even_if_nothing_is_sent_again(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)

    site.wait_for_status(site.send(), "completed")


def test_a_worker_that_sleeps_hears_of_a_stop_and_of_a_termination(site: Site, receiver: Receiver) -> None:
    worker = asleep(site, receiver)
    site.db.execute("select ulak.stop()")
    worker.result()

    start_listening(site).end()


def test_other_notifications_do_no_harm(site: Site, receiver: Receiver) -> None:
    worker = asleep(site, receiver, poll_interval=5)

    # More than the worker listens to for nothing: from then on it polls.
    for _ in range(400):
        site.db.execute("notify somebody_else")
        wait_until_idle(worker.pid)

    send_one(site, receiver)


def test_notifications_are_not_passed_on_to_the_client(site: Site, receiver: Receiver) -> None:
    """Somebody who runs the worker in psql must not see notifications when it ends."""
    worker = asleep(site, receiver)
    heard: list[Notify] = []
    worker.connection.add_notify_handler(heard.append)
    send_one(site, receiver)
    site.db.execute("select ulak.stop()")
    worker.result()

    # Pending notifications arrive with the answer to the next statement.
    assert worker.connection.execute("select pg_listening_channels()").fetchall() == []
    assert heard == []
