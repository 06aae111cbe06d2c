"""The steady pipeline: order, slow receivers beside quick ones, leases, several workers, memory."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict

from support.memory import LINUX, resident
from support.receiver import Answer, Received, Receiver
from support.sessions import wait_until
from support.site import SETTLED, Site

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
    """Four of them could fill every slot; a run waits for them beyond its end and its first lease."""
    site.configure(lease_seconds=5, worker_concurrency=16)
    with Receiver(Answer(delay=6)) as slow:
        for n in range(4):
            site.http(f"slow {n}", slow.url, timeout=20)
            site.send_many(20, f"slow {n}")
        site.http("shop", receiver.url)
        worker = site.start(seconds=2)
        slow.wait_for(16)
        over = "select clock_timestamp() > started_at + interval '5.5 s' from ulak.workers"
        while not site.value(over):
            site.wait_for_status(site.send("shop"), "completed")
        assert site.value("select ulak.recover_stale_messages()") == 0
        sent = len(slow.requests)

        worker.result()

        # What was not claimed again after the end of its time waits for the next run.
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


def test_a_message_of_an_endpoint_with_a_cap_follows_as_soon_as_there_is_room(site: Site, receiver: Receiver) -> None:
    """At the idle pace of a second per look, fifty of them would take far longer than the test waits."""
    site.configure(poll_interval=1000)
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
    peak = before = resident(worker.pid)

    site.db.execute(
        "insert into ulak_private.deliveries (endpoint_id, payload) select %s, to_jsonb(repeat('x', 1000000)) from generate_series(1, 150)",
        [endpoint],
    )
    while not site.value(SETTLED):
        peak = max(peak, resident(worker.pid))

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
