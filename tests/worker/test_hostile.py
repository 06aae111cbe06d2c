"""All hostile receivers as endpoints at once, and healthy ones beside them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import hostile
from support.hostile import Hostile
from support.memory import LINUX, resident
from support.receiver import Answer, Certificate, Listener, Receiver, make_certificate
from support.sessions import wait_until
from support.site import LONGEST_TIMEOUT, UNBROKEN, Site

# Of endpoints whose requests may end by it. Those of the others have as much time as a busy machine may need.
TIMEOUT = 1
MESSAGES = 4
HEALTHY = 5
# Slots for requests, and as many again for slow receivers.
SLOTS = 64
# The longest delay of a policy: nothing is tried again while the test runs.
DELAY = 3600

# What last_error starts with, the status, and the seconds until the next try; None: delivered.
LATER = "pending"
EXPECTED: dict[str, tuple[str, str, int | None] | None] = {
    "never_answers": ("[RETRYABLE] timeout: ", LATER, DELAY),
    "slow_headers": ("[RETRYABLE] timeout: ", LATER, DELAY),
    "slow_body": ("[RETRYABLE] timeout: ", LATER, DELAY),
    "closes_at_once": ("[RETRYABLE] network: ", LATER, DELAY),
    "closes_mid_body": ("[RETRYABLE] network: ", LATER, DELAY),
    "resets": ("[RETRYABLE] network: ", LATER, DELAY),
    "invalid_status_line": ("[RETRYABLE] network: ", LATER, DELAY),
    "bad_chunking": ("[RETRYABLE] network: ", LATER, DELAY),
    "endless_headers": ("[RETRYABLE] ", LATER, DELAY),
    "endless_small_headers": ("[RETRYABLE] ", LATER, DELAY),
    "endless_folded_header": ("[RETRYABLE] ", LATER, DELAY),
    "endless_interim_answers": ("[RETRYABLE] ", LATER, DELAY),
    "huge_body": None,
    "gzip_bomb": None,
    "redirect_to_metadata": ("[PERMANENT] HTTP 302", "failed", None),
    "gone": ("[DISABLE] HTTP 410", "failed", None),
    "empty_200": None,
    "tls_self_signed": ("[RETRYABLE] tls: ", LATER, DELAY),
    "tls_expired": ("[RETRYABLE] tls: ", LATER, DELAY),
    "tls_wrong_host": ("[RETRYABLE] tls: ", LATER, DELAY),
    "tls_on_a_plain_port": ("[RETRYABLE] tls: ", LATER, DELAY),
    "unresolvable": ("[RETRYABLE] resolve: ", LATER, DELAY),
    "refused": ("[RETRYABLE] connect: ", LATER, DELAY),
    "blocked_address": ("[PERMANENT] blocked: address 127.0.0.2 is blocked (loopback", "failed", None),
    "429_seconds": ("[RETRYABLE] HTTP 429", LATER, 7200),
    "503_date": ("[RETRYABLE] HTTP 503", LATER, 86400),
    "503_past_date": ("[RETRYABLE] HTTP 503", "failed", 0),
    "429_huge": ("[RETRYABLE] HTTP 429", LATER, 86400),
    "503_nonsense": ("[RETRYABLE] HTTP 503", LATER, DELAY),
    "503_negative": ("[RETRYABLE] HTTP 503", LATER, DELAY),
}
RETRY_AFTER = {
    "429_seconds": (429, "7200"),
    "503_date": (503, "Fri, 31 Dec 2100 23:59:59 GMT"),
    "503_past_date": (503, "Fri, 31 Dec 1999 23:59:59 GMT"),
    "429_huge": (429, "9" * 40),
    "503_nonsense": (503, "soon, I promise"),
    "503_negative": (503, "-5"),
}
# Messages that a worker holds, or takes before long.
UNDER_WAY = """
    select exists (select from ulak.queue where status = 'processing' or next_retry_at < now() + interval '10 minutes')
"""
# Requests to endpoints that have had no answer yet.
FIRST_TRIES = """
    select q.id from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
    where e.name = any (%s) and q.status = 'processing' and q.attempts = 1
"""
COMPLETED = "select count(*) from ulak.messages where id = any (%s) and status = 'completed'"
HANGS = [name for name, expected in EXPECTED.items() if expected is not None and "timeout" in expected[0]]


class Plain(Listener):
    """Answers whatever comes, in plain text."""

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[dict[str, dict[str, Any]]]:
    """The config of each hostile endpoint; their servers run meanwhile."""
    folder: Path = tmp_path_factory.mktemp("hostile")
    expired = make_certificate(folder, days=(-30, -1), file="expired")
    elsewhere = make_certificate(folder, names=("elsewhere.example",), file="elsewhere")
    hostile.bomb()
    with ExitStack() as stack:
        servers: dict[str, Listener] = {each.__name__: Hostile(each) for each in hostile.BEHAVIOURS}
        for name, (status, value) in RETRY_AFTER.items():
            servers[name] = Receiver(Answer(status, {"retry-after": value}))
        servers |= {
            "redirect_to_metadata": Receiver(Answer(302, {"location": "http://169.254.169.254/latest/meta-data/"})),
            "gone": Receiver(Answer(410)),
            "empty_200": Receiver(),
            "tls_self_signed": Receiver(certificate=certificate),
            "tls_expired": Receiver(certificate=expired),
            "tls_wrong_host": Receiver(certificate=elsewhere),
            "tls_on_a_plain_port": Plain(),
            "blocked_address": Receiver(host="0.0.0.0"),
        }
        for server in servers.values():
            stack.enter_context(server)
        found: dict[str, dict[str, Any]] = {name: {"url": server.url} for name, server in servers.items()}
        found["tls_expired"]["tls_ca_bundle"] = str(expired.certificate)
        found["tls_wrong_host"]["tls_ca_bundle"] = str(elsewhere.certificate)
        found["tls_on_a_plain_port"]["url"] = servers["tls_on_a_plain_port"].url.replace("http:", "https:")
        found["unresolvable"] = {"url": "http://nothing.invalid/"}
        found["refused"] = {"url": "http://127.0.0.1:9/"}
        found["blocked_address"]["url"] = servers["blocked_address"].url.replace("0.0.0.0", "127.0.0.2")
        yield found


def test_hostile_receivers_are_judged_as_documented(site: Site, configs: dict[str, dict[str, Any]]) -> None:
    site.configure(http_allowed_networks="127.0.0.1/32", http_connect_timeout=60, worker_concurrency=SLOTS)
    policy = {"backoff": "fixed", "base_delay_seconds": DELAY}
    for name, config in configs.items():
        expected = EXPECTED[name]
        may_time_out = name in HANGS or (expected is not None and expected[0] == "[RETRYABLE] ")
        timeout = TIMEOUT if may_time_out else LONGEST_TIMEOUT
        site.http(name, timeout=timeout, policy=policy, circuit_breaker=UNBROKEN, **config)
        site.send_many(MESSAGES, name)

    worker = site.start()
    wait_until(lambda: not site.value(UNDER_WAY), "a judgement of each")

    rows = site.rows("""
        select
            e.name,
            q.status,
            q.last_error,
            q.attempts,
            extract(epoch from q.next_retry_at - q.updated_at)::float as delay
        from ulak.messages q
        join ulak.endpoints e on e.id = q.endpoint_id
    """)
    judged = {name: [row for row in rows if row["name"] == name] for name in EXPECTED}
    problems = [
        f"{name}: {row}" for name, expected in EXPECTED.items() for row in judged[name] if not is_as(row, expected)
    ]
    assert problems == []
    assert {name: len(found) for name, found in judged.items()} == dict.fromkeys(configs, MESSAGES)
    assert not worker.call.is_done()


def test_receivers_that_hang_delay_no_other(site: Site, configs: dict[str, dict[str, Any]], receiver: Receiver) -> None:
    """Beside all other hostile ones. There are more messages for each that hangs than slots."""
    site.configure(http_allowed_networks="127.0.0.1/32", worker_concurrency=SLOTS)
    for name, config in configs.items():
        site.http(name, timeout=LONGEST_TIMEOUT, circuit_breaker=UNBROKEN, **config)
        site.send_many(2 * SLOTS if name in HANGS else MESSAGES, name)
    for n in range(HEALTHY):
        site.http(f"healthy {n}", receiver.url)
    worker = site.start()
    held = wait_until(lambda: len(found := site.column(FIRST_TRIES, HANGS)) >= SLOTS and found, "requests in all slots")

    ids = [site.send(f"healthy {n}") for _ in range(20) for n in range(HEALTHY)]
    wait_until(lambda: site.value(COMPLETED, ids) == len(ids), "all healthy ones")

    # None of them has ended meanwhile.
    assert set(held) <= set(site.column(FIRST_TRIES, HANGS))
    assert not worker.call.is_done()


HEARD = "select count(*) = 0 from ulak.queue where last_error is null and status in ('pending', 'processing')"


@LINUX
def test_hostile_answers_do_not_fill_the_memory_of_a_worker(site: Site, receiver: Receiver) -> None:
    """64 messages to each kind, and what comes back is kept as responses."""
    hostile.bomb()
    site.configure(worker_concurrency=64, capture_response=True)
    site.http("healthy", receiver.url)
    with ExitStack() as stack:
        kinds = (*hostile.BEHAVIOURS, hostile.endless_trailers, hostile.gzip_bomb_in_transfer)
        servers = {each.__name__: stack.enter_context(Hostile(each)) for each in kinds}
        policy = {"backoff": "fixed", "base_delay_seconds": 600}
        for name, server in servers.items():
            site.http(name, server.url, timeout=TIMEOUT, policy=policy, circuit_breaker={"threshold": 1000})
        worker = site.start()
        site.wait_for_status(site.send("healthy"), "completed")
        peak = before = resident(worker.pid)

        for name in servers:
            site.send_many(64, name)
        while not site.value(HEARD):
            peak = max(peak, resident(worker.pid))

    assert peak - before < 70_000_000


@LINUX
def test_captured_answers_to_batches_do_not_fill_the_memory_of_a_worker(site: Site) -> None:
    """Each answer is stored with each of its batch's messages."""
    site.configure(capture_response=True)
    with Receiver(Answer(500, body=b"x" * 65536)) as receiver:
        policy = {"backoff": "fixed", "base_delay_seconds": 600}
        site.http("shop", receiver.url, batch_size=100, policy=policy, circuit_breaker={"threshold": 1000})
        worker = site.start()
        site.wait_for_error(site.send("shop"), "HTTP 500")
        peak = before = resident(worker.pid)

        site.send_many(1000)
        while not site.value(HEARD):
            peak = max(peak, resident(worker.pid))

    assert peak - before < 100_000_000
    assert site.value("select count(*) from ulak.queue where length(response ->> 'body') > 20000") == 1001


def is_as(row: dict[str, Any], expected: tuple[str, str, int | None] | None) -> bool:
    if expected is None:
        return row["status"] == "completed"
    error, status, delay = expected
    if row["status"] != status or not (row["last_error"] or "").startswith(error):
        return False
    if delay == 0:
        # Tried again at once, until no retry is left.
        return bool(row["attempts"] > 1)
    return row["attempts"] == 1 and (delay is None or abs(row["delay"] - delay) < 2)
