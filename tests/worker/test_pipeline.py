"""The steady pipeline: order, slow receivers beside quick ones, leases, several workers, memory."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from psycopg.sql import SQL
from support.cluster import Cluster
from support.defects import install_defect
from support.memory import LINUX, peak_until, resident
from support.messages import insert_messages
from support.node import Held
from support.receiver import Answer, Received, Receiver
from support.rewritten import rewritten
from support.sessions import wait_until
from support.site import LONGEST_TIMEOUT, SETTLED, Site

POLLERS = """
    select w.pid from ulak.workers w where ulak_private.is_taken(w) and ulak_private.is_poller(w.slot)
"""


class Ordered:
    """Answers 503 to each seventh request, and sees whether two messages of a key are under way at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._count = 0
        self.overlaps = 0
        self.delivered: dict[str, list[int]] = defaultdict(list)

    def __call__(self, request: Received) -> Answer:
        body = json.loads(request.body)
        with self._lock:
            self.overlaps += body["key"] in self._under_way
            self._under_way.add(body["key"])
            self._count += 1
            fails = self._count % 7 == 0
        with self._lock:
            self._under_way.remove(body["key"])
            if not fails:
                self.delivered[body["key"]].append(body["n"])
        return Answer(503, {"retry-after": "0"}) if fails else Answer()


def test_a_key_stays_in_order_and_one_in_flight_under_failures_and_two_workers(site: Site) -> None:
    check = Ordered()
    with Receiver(check) as receiver:
        site.http("shop", receiver.url, {"max_retries": 100}, circuit_breaker={"threshold": 1000})
        for n in range(25):
            for key in ("a", "b", "c"):
                site.send("shop", {"key": key, "n": n}, ordering_key=key)

        site.start()
        site.start()
        site.wait_until_settled()

    assert check.delivered == {key: list(range(25)) for key in ("a", "b", "c")}
    assert check.overlaps == 0
    assert site.value("select sum(attempts) > 75 from ulak.messages")


def test_slow_receivers_delay_no_other_and_nothing_is_sent_twice(site: Site, receiver: Receiver) -> None:
    """Four of them could fill every slot; a run waits for them beyond its end and their first lease."""
    site.configure(lease_seconds=15, worker_concurrency=16)
    with Held() as held:
        slow = held.receiver
        for n in range(4):
            site.http(f"slow {n}", slow.url, timeout=LONGEST_TIMEOUT)
            site.send_many(20, f"slow {n}")
        site.http("shop", receiver.url)
        worker = site.start()
        slow.wait_for(16)

        def deliver_until(query: str, *parameters: object) -> None:
            def is_so() -> object:
                site.wait_for_status(site.send("shop"), "completed")
                return site.value(query, *parameters)

            wait_until(is_so, query)

        end = site.value("select max(lease_until) from ulak.queue")
        deliver_until("select min(lease_until) > %s from ulak.queue", end)
        assert site.call("recover_stale_messages", now=end) == 0
        # With another build there, the run is over. It has noticed by its second report.
        with rewritten(site.db, "ulak_private.stamp_of", "' '", "' another '"):
            for _ in range(2):
                since = site.value("select clock_timestamp()")
                deliver_until("select heartbeat_at > %s from ulak.workers", since)
            sent = len(slow.requests)
            assert not worker.call.is_done()

            held.release()
            worker.result()

        # What was not claimed again after the end of the run waits for the next one.
        assert site.value("select count(*) from ulak.queue where status = 'processing'") == 0
        assert site.value("select count(*) from ulak.messages where status = 'completed'") == sent + len(
            receiver.requests
        )
        assert site.value("select max(attempts) from ulak.messages") == 1
        assert 16 <= sent < 80


def test_a_batch_is_one_request_and_is_settled_together(site: Site) -> None:
    with Receiver(lambda request: Answer(422 if b'"n": 7}' in request.body else 200)) as receiver:
        site.http("shop", receiver.url, batch_size=50, batch_format="json")
        site.start()
        # From now on the worker knows that the endpoint takes batches.
        site.wait_for_status(site.send("shop", {"n": 0}), "completed")
        site.send_many(120)
        site.wait_until_settled()

        numbers = [[body["n"] for body in json.loads(request.body)] for request in receiver.requests]
    assert sorted(numbers) == [[0], list(range(1, 51)), list(range(51, 101)), list(range(101, 121))]
    statuses = site.column("select status from ulak.messages order by id")
    assert statuses == ["completed"] + ["failed"] * 50 + ["completed"] * 70
    assert site.value("select count(*) from ulak.dlq") == 50


# An outcome that nobody waits for is stored after an hour, and only the next look in an hour finds more.
LAST = "STOP_SECONDS = 2.0\n"
SELDOM = """
BUSY_SECONDS = 0.0
SETTLE_SECONDS = LOOK_SECONDS = LOOK_SECONDS_OFTEN = LOOK_SECONDS_EMPTY = 3600.0
"""


def test_a_message_of_an_endpoint_with_a_cap_follows_as_soon_as_there_is_room(
    cluster: Cluster, database: str, receiver: Receiver, tmp_path: Path
) -> None:
    with closing(Site(cluster, database)) as site:
        install_defect(site.db, tmp_path, "worker/tuning.py", LAST, LAST + SELDOM)
        site.configure(poll_interval=60000)
        site.http("shop", receiver.url, max_in_flight=1)
        site.send_many(50)
        site.start()

        site.wait_until_settled()


def test_one_worker_of_a_fleet_looks_often_and_another_takes_over(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    workers = [site.start(), site.start()]
    (first,) = wait_until(lambda: site.column(POLLERS))

    next(worker for worker in workers if worker.pid == first).end()

    (second,) = wait_until(lambda: [pid for pid in site.column(POLLERS) if pid != first])
    assert second in [worker.pid for worker in workers]


@LINUX
def test_messages_that_are_small_as_they_are_stored_do_not_fill_the_memory_of_a_worker(site: Site) -> None:
    """A megabyte of the same letter takes 11 kB in the table."""
    endpoint = site.endpoint("log", {"max_bytes": 0}, protocol="log")
    site.send_many(2000, "log")
    worker = site.start()
    site.wait_until_settled()
    before = resident(worker.pid)

    insert_messages(site.db, 150, endpoint_id=endpoint, payload=SQL("to_jsonb(repeat('x', 1000000))"))
    peak = peak_until(lambda: site.value(SETTLED), worker.pid, "an empty queue")

    assert peak - before < 160_000_000
    assert site.value("select count(*) from ulak.messages where status = 'completed'") == 2150


@LINUX
def test_memory_stays_flat(site: Site, receiver: Receiver) -> None:
    site.http("batches", receiver.url, batch_size=500)
    site.http("singles", receiver.url)
    worker = site.start()

    def deliver() -> int:
        site.send_many(10000, "batches")
        site.send_many(500, "singles")
        site.wait_until_settled()
        receiver.requests.clear()
        return resident(worker.pid)

    rounds = [deliver() for _ in range(6)]

    # What stays for each message makes every round grow, a hundred bytes by a million. How much is in use at once depends on timing, so
    # some rounds grow without a leak.
    growth = [later - earlier for earlier, later in itertools.pairwise(rounds[1:])]
    assert min(growth) < 500_000


def test_of_a_batch_that_was_taken_in_part_only_the_rest_is_sent_again(site: Site) -> None:
    def answer(request: Received) -> Answer:
        ids = request.headers["ulak-message-ids"].split(",")
        numbers = [body["n"] for body in json.loads(request.body)]
        assert len(ids) == len(numbers) and numbers == sorted(numbers)
        if request.headers["ulak-attempt"] != "1":
            return Answer(200)
        failed: list[object] = [id for id, n in zip(ids, numbers, strict=True) if n % 10 == 3]
        failed += [
            {"id": id, "error": "no such thing", "permanent": True}
            for id, n in zip(ids, numbers, strict=True)
            if n == 5
        ]
        return Answer(207, body=json.dumps({"failed": failed}).encode())

    with Receiver(answer) as receiver:
        site.http(
            "shop",
            receiver.url,
            batch_size=50,
            circuit_breaker={"threshold": 1},
            policy={"base_delay_seconds": 1, "jitter": "none"},
        )
        site.start()
        site.send_many(40)
        site.wait_until_settled()

        again = [
            body["n"]
            for got in receiver.requests
            if got.headers["ulak-attempt"] != "1"
            for body in json.loads(got.body)
        ]
    assert sorted(again) == [3, 13, 23, 33]
    assert site.column("select payload -> 'n' from ulak.dlq") == [5]
    assert site.value("select last_error from ulak.dlq") == "[PERMANENT] HTTP 207: no such thing"
    assert site.value("select count(*) from ulak.messages where status = 'completed'") == 39
    # Each request was answered: the receiver is well.
    assert site.value("select circuit_state from ulak.endpoints") == "closed"
