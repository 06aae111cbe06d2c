"""Messages that come one by one: the worker sleeps until a sender wakes it."""

from __future__ import annotations

from support.hostile import Hostile, never_answers
from support.receiver import Receiver
from support.sessions import strain, wait_until, wait_until_idle
from support.site import Site, WorkerSession, promptly, seconds_of

# A worker that has to look for a message comes too late.
SELDOM = {"poll_interval": 60000, "poll_interval_busy": 1000}


def asleep(site: Site, receiver: Receiver, **settings: int) -> WorkerSession:
    """A worker that listens."""
    site.http("shop", receiver.url)
    site.configure(**(SELDOM | settings))
    return start_listening(site)


def start_listening(site: Site) -> WorkerSession:
    site.db.execute("select setval('ulak_private.bell', 1, false)")
    worker = site.start()
    wait_until(
        lambda: site.value("select pg_sequence_last_value('ulak_private.bell')"), message="a worker that listens"
    )
    return worker


def arrives(site: Site, receiver: Receiver) -> float:
    before = len(receiver.requests)
    site.send()
    return seconds_of(lambda: wait_until(lambda: len(receiver.requests) > before))


def test_a_message_wakes_the_worker(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)

    for _ in range(20):
        assert arrives(site, receiver) < promptly()
        site.wait_until_settled()

    assert site.value("select count(*) from ulak.messages where status = 'completed' and attempts = 1") == 20


def test_a_message_wakes_it_while_another_is_under_way(site: Site, receiver: Receiver) -> None:
    with Hostile(never_answers) as slow:
        asleep(site, receiver)
        site.http("slow", slow.url)
        site.send("slow")
        wait_until(lambda: slow.connections)

        for number in range(1, 21):
            assert arrives(site, receiver) < promptly()
            stored = "select count(*) = %s from ulak.messages where status = 'completed'"
            wait_until(lambda: site.value(stored, number), message="the outcome")  # noqa: B023


def test_a_sender_that_stays_in_its_transaction_wakes_it_by_its_commit(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)
    sender = site.connect(autocommit=False)
    sender.execute("select ulak.send('shop', '{}')")
    # Others draw their ids and are delivered meanwhile, until wake-ups are asked for again.
    for _ in range(20):
        arrives(site, receiver)

    before = len(receiver.requests)
    sender.commit()

    assert seconds_of(lambda: wait_until(lambda: len(receiver.requests) > before)) < promptly()
    sender.close()


def test_many_messages_of_one_transaction_are_all_claimed_at_once(site: Site, receiver: Receiver) -> None:
    with Hostile(never_answers) as slow:
        # While no outcome is stored, only claims find more messages.
        site.http("slow", slow.url)
        asleep(site, receiver, worker_concurrency=200)
        arrives(site, receiver)
        site.wait_until_settled()

        site.db.execute("select ulak.send('slow', '{}') from generate_series(1, 40)")

        claimed = "select not exists (select from ulak.queue where status = 'pending')"
        assert seconds_of(lambda: wait_until(lambda: site.value(claimed))) < promptly()


def test_outcomes_are_stored_soon_even_if_nothing_is_sent_again(site: Site, receiver: Receiver) -> None:
    asleep(site, receiver)
    id = site.send()

    wait_until(lambda: receiver.requests)

    assert seconds_of(lambda: site.wait_for_status(id, "completed")) < promptly()


def test_a_worker_that_sleeps_hears_of_a_stop_and_of_a_cancel(site: Site, receiver: Receiver) -> None:
    worker = asleep(site, receiver)
    site.db.execute("select ulak.stop()")
    assert seconds_of(worker.result) < promptly()

    another = start_listening(site)
    site.db.execute("select pg_terminate_backend(%s)", [another.pid])
    assert seconds_of(another.end) < promptly() + 0.1


def test_other_notifications_do_no_harm(site: Site, receiver: Receiver) -> None:
    worker = asleep(site, receiver, poll_interval=50, poll_interval_busy=2)

    # More than the worker listens to for nothing: from then on it polls.
    for _ in range(400):
        site.db.execute("notify somebody_else")
        wait_until_idle(worker.pid)

    assert arrives(site, receiver) < 0.5 * strain()


def test_notifications_are_not_passed_on_to_the_client(site: Site, receiver: Receiver) -> None:
    """Somebody who runs the worker in psql must not see notifications when it ends."""
    worker = asleep(site, receiver)
    arrives(site, receiver)
    site.db.execute("select ulak.stop()")
    worker.result()

    assert list(worker.connection.notifies(timeout=0.1)) == []
    assert worker.connection.execute("select pg_listening_channels()").fetchall() == []
