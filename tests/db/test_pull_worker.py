"""The external worker that the runbook shows, word for word."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import PROJECT, Cluster, Connect
from support.queue import Queue
from support.sessions import Running, patience, wait_until

Handle = Callable[[Any], None]


def shown(name: str = "consumer.py") -> str:
    """The program of the section that says its file's name in its first line."""
    runbook = (PROJECT / "docker" / "OPERATIONS.md").read_text()
    found = re.search(rf"^```python\n(# {name}: .*?)^```$", runbook, re.MULTILINE | re.DOTALL)
    assert found is not None, "the runbook shows no such consumer"
    return found[1]


@pytest.fixture
def queue(connect: Connect) -> Queue:
    queue = Queue(connect())
    queue.endpoint("billing", policy={"backoff": "schedule", "schedule": [0], "max_retries": 3})
    queue.call("grant_endpoint", "billing", "test_ulak_consumer")
    return queue


class Worker:
    """The runbook's worker in a thread of its own."""

    def __init__(self, dsn: str, handle: Handle, batch: int) -> None:
        self.stop = threading.Event()
        self.text: dict[str, Any] = {}
        exec(compile(shown(), "OPERATIONS.md", "exec"), self.text)
        self._running = Running(lambda: self.text["work"](dsn, "billing", handle, self.stop, batch))

    def end(self) -> None:
        self.stop.set()
        self._running.result()


@pytest.fixture
def start(cluster: Cluster, database: str, queue: Queue) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(handle: Handle, batch: int = 25) -> Worker:
        workers.append(Worker(cluster.dsn(database, "test_ulak_consumer"), handle, batch))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


Start = Callable[..., Worker]


def settled(queue: Queue) -> Callable[[], bool]:
    return lambda: not queue.value("select exists (select from ulak.queue where status in ('pending', 'processing'))")


def test_it_handles_each_message_and_completes_it(queue: Queue, start: Start) -> None:
    handled: list[int] = []
    ids = queue.send_many(20, "billing")

    start(lambda message: handled.append(message.id))
    wait_until(settled(queue))

    assert handled == ids
    assert set(queue.column("select status from ulak.archive")) == {"completed"}


def test_what_it_raises_decides_between_a_retry_and_the_dead_letter_queue(queue: Queue, start: Start) -> None:
    attempts: list[str] = []

    def handle(message: Any) -> None:
        attempts.append(message.payload["what"])
        if message.payload["what"] == "wrong":
            raise ValueError("no such customer")
        if attempts.count("shaky") < 3:
            raise ConnectionError("try again")

    wrong = queue.send("billing", {"what": "wrong"})
    shaky = queue.send("billing", {"what": "shaky"})
    start(handle)
    wait_until(settled(queue))

    assert attempts.count("wrong") == 1
    assert queue.dead(wrong)["last_error"] == "[PERMANENT] no such customer"
    assert attempts.count("shaky") == 3
    assert queue.status(shaky) == "completed"
    assert queue.message(shaky)["last_error"] == "[RETRYABLE] try again"


def test_a_result_that_comes_too_late_is_dropped_and_the_worker_goes_on(queue: Queue, start: Start) -> None:
    first_is_under_way, lease_is_lost = threading.Event(), threading.Event()
    handled: list[tuple[int, int]] = []

    def handle(message: Any) -> None:
        handled.append((message.id, message.attempt))
        if message.attempt == 1:
            first_is_under_way.set()
            assert lease_is_lost.wait(patience())

    id = queue.send("billing")
    start(handle)
    assert first_is_under_way.wait(patience())
    assert queue.call("recover_stale_messages", now=queue.at(0)) == 1
    queue.db.execute("update ulak.queue set next_retry_at = now()")
    lease_is_lost.set()
    wait_until(settled(queue))

    assert handled == [(id, 1), (id, 2)]
    assert queue.status(id) == "completed"


def test_its_lease_is_renewed_while_it_works(queue: Queue, start: Start) -> None:
    """Its heartbeat is called as it would be after 20 s."""
    is_under_way, may_end = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        is_under_way.set()
        assert may_end.wait(patience())

    id = queue.send("billing")
    worker = start(handle)
    assert is_under_way.wait(patience())
    message = queue.message(id)

    class Twenty:
        """An event that isn't set when the first 20 s are over, and is set after that."""

        def __init__(self) -> None:
            self.waited: list[float] = []

        def wait(self, seconds: float) -> bool:
            self.waited.append(seconds)
            return len(self.waited) > 1

    done = Twenty()
    lease = SimpleNamespace(id=id, attempt=message["attempts"])
    worker.text["beat"](queue.db, message["locked_by"], [lease], done)
    renewed = queue.message(id)["lease_until"]
    may_end.set()

    assert done.waited == [20, 20]
    assert renewed > message["lease_until"]


def test_two_of_them_share_the_work(queue: Queue, start: Start) -> None:
    handled: list[int] = []
    together = threading.Barrier(2)

    def handle(message: Any) -> None:
        if message.payload["n"] <= 2:
            together.wait(patience())
        handled.append(message.id)

    ids = queue.send_many(10, "billing")
    start(handle, batch=1)
    start(handle, batch=1)
    wait_until(settled(queue))

    assert sorted(handled) == ids


def test_it_gives_back_what_it_has_not_begun_when_it_is_stopped(queue: Queue, start: Start) -> None:
    is_under_way, may_end = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        is_under_way.set()
        assert may_end.wait(patience())

    ids = queue.send_many(3, "billing")
    worker = start(handle)
    assert is_under_way.wait(patience())
    worker.stop.set()
    may_end.set()
    worker.end()

    assert [queue.status(id) for id in ids] == ["completed", "pending", "pending"]
    assert [queue.message(id)["retry_count"] for id in ids] == [0, 0, 0]


def test_the_asynchronous_one_works_off_a_batch_and_what_is_sent_while_it_sleeps(
    cluster: Cluster, database: str, queue: Queue
) -> None:
    text: dict[str, Any] = {}
    exec(compile(shown("consumer_async.py"), "OPERATIONS.md", "exec"), text)
    handled: list[int] = []
    wrong = queue.send("billing", {"n": "wrong"})
    ids = queue.send_many(30, "billing")

    async def play() -> None:
        stop = asyncio.Event()

        async def handle(message: Any) -> None:
            if message.payload["n"] == "wrong":
                raise ValueError("no such customer")
            handled.append(message.id)
            if message.payload["n"] == "last":
                stop.set()

        running = asyncio.create_task(
            text["work"](cluster.dsn(database, "test_ulak_consumer"), "billing", handle, stop)
        )
        await asyncio.to_thread(wait_until, settled(queue))
        ids.append(queue.send("billing", {"n": "last"}))
        await asyncio.wait_for(running, patience())

    asyncio.run(play())

    assert sorted(handled) == ids
    assert queue.dead(wrong)["last_error"] == "[PERMANENT] no such customer"
    assert settled(queue)()


def test_a_right_to_work_where_workers_deliver_comes_with_a_word_about_it(queue: Queue) -> None:
    notices: list[str] = []
    queue.db.add_notice_handler(lambda each: notices.append(f"{each.message_primary}. {each.message_hint}"))
    queue.endpoint("web", {"url": "https://example.com"}, protocol="http")
    queue.endpoint("own")

    queue.call("grant_endpoint", "own", "ulak_consumer")
    assert notices == []
    queue.call("grant_endpoint", "web", "ulak_consumer")

    (told,) = notices
    assert told.startswith('endpoint "web" is of protocol http: workers deliver its messages, too. ')
    assert told.endswith("select * from ulak.claim('worker', 1, 'web');")
