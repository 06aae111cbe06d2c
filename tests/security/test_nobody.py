"""What a role without any grant can do to others: everybody may take advisory locks, so nothing may depend on one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.receiver import Receiver
from support.site import Site

# What ulak ever took, by number and by the hash of a name.
NAMES = (
    "ulak_cb",
    "ulak_endpoint",
    "ulak_endpoint_id",
    "ulak_key",
    "ulak_maintenance",
    "ulak_schedule",
    "ulak_configs",
    "ulak_config",
    "ulak_limit",
    "ulak_settings",
    "ulak_poller",
    "ulak_sweep",
    "ulak_worker",
    "ulak_queue",
    "ulak",
)


def maintain(queue: Queue) -> None:
    """A session that finds it taken leaves silently, so what was done counts."""
    queue.db.execute("call ulak.run_maintenance()")

    query = "select step from ulak.maintenance_status where state <> 'ok' and step <> 'vacuum'"
    assert queue.column(query) == []


def sweep(queue: Queue) -> None:
    queue.db.execute("""
        insert into ulak_private.deliveries (endpoint_id, event_id, status, attempts, locked_by, lease_until)
        select e.id, 0, 'processing', 1, 'gone', now() - interval '1 hour' from ulak.endpoints e where e.name = 'limited'
    """)

    queue.db.execute("select ulak_private.sweep()")

    assert queue.column("select status from ulak.queue") == ["pending"]


OPERATIONS: dict[str, Callable[[Queue], object]] = {
    "disable": lambda queue: queue.call("disable_endpoint", "shop"),
    "alter": lambda queue: queue.call("alter_endpoint", "shop", {"max_in_flight": 2}),
    "drop": lambda queue: queue.call("drop_endpoint", "shop"),
    "create": lambda queue: queue.endpoint("new"),
    "configure": lambda queue: queue.call("configure", "max_queue_size", "1000"),
    "secret": lambda queue: queue.call("set_secret", "s", "value"),
    "start": lambda queue: queue.rows("select * from ulak.start()"),
    "stop": lambda queue: queue.rows("select * from ulak.stop()"),
    "maintenance": maintain,
    "sweep": sweep,
}


@pytest.fixture
def queue(connect: Connect) -> Queue:
    queue = Queue(connect())
    # A statement that waits for the role nobody is cancelled before pytest's time-out.
    queue.db.execute("set statement_timeout = '10min'")
    queue.endpoint("shop", {"circuit_breaker": {"threshold": 2, "cooldown": 5}}, {"max_retries": 0})
    queue.endpoint("limited", {"max_in_flight": 3, "rate_limit": {"limit": 1000, "interval": "second"}})
    queue.call("create_event_type", "sold")
    queue.call("subscribe", "sold", "shop")
    return queue


@pytest.fixture
def waits(queue: Queue) -> list[str]:
    """Each advisory lock that the queue's session waits for, as the server says at once."""
    told: list[str] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        told.extend(re.findall(r"still waiting for \w+ on (advisory lock .*) after", diagnostic.message_primary or ""))

    queue.db.add_notice_handler(note)
    queue.db.execute("set log_lock_waits = on")
    queue.db.execute("set deadlock_timeout = '1ms'")
    queue.db.execute("set client_min_messages = log")
    return told


@pytest.fixture
def nobody(connect: Connect, queue: Queue, waits: list[str]) -> Iterator[psycopg.Connection[Any]]:
    """Holds every lock that a session might want, in this database. The queue's session waits for none of them, except for a breaker's."""
    session = connect("nobody")
    keys = ["shop", "limited", "k", "o", *map(str, range(50))]
    for name in NAMES:
        session.execute("select pg_advisory_lock(hashtext(%s), n) from generate_series(0, 50) n", [name])
        session.execute("select pg_advisory_lock(hashtext(%s), hashtext(k)) from unnest(%s::text[]) k", [name, keys])
        session.execute("select pg_advisory_lock(hashtext(%s))", [name])
    # Of one key of an ordering, by whatever was hashed of it.
    for endpoint_id in queue.column("select id from ulak.endpoints"):
        session.execute(
            "select pg_advisory_lock(hashtext('ulak_key'), hashtext(%s || t)) from unnest(%s::text[]) t",
            [str(endpoint_id), [" k", ":k", "k", "/k"]],
        )
        session.execute(
            "select pg_advisory_lock(hashtext('ulak_key'), hashtextextended('k', %s)::bit(32)::integer)", [endpoint_id]
        )
    yield session
    breakers = queue.value("""
        select format('advisory lock [%s,%s,', oid, hashtext('ulak_cb')::bigint & x'ffffffff'::bigint)
        from pg_database where datname = current_database()
    """)
    assert [each for each in waits if not each.startswith(breakers)] == []


def send(queue: Queue) -> list[int]:
    return [
        queue.send(),
        queue.send(ordering_key="k"),
        queue.send(idempotency_key="i"),
        queue.send("limited", ordering_key="k"),
        *queue.send_many(2, "limited"),
    ]


@pytest.mark.usefixtures("nobody")
def test_sending_goes_on(queue: Queue) -> None:
    send(queue)

    assert queue.call("publish", "sold", {"n": 1}) == 1
    assert queue.value("select count(*) from ulak.messages") == 7


@pytest.mark.usefixtures("nobody")
def test_claiming_and_settling_go_on(queue: Queue) -> None:
    sent = send(queue)

    claims = queue.claim(100)
    assert {claim.id for claim in claims} == set(sent)
    for claim in claims:
        queue.complete(claim)

    assert set(queue.column("select status from ulak.messages")) == {"completed"}


@pytest.mark.usefixtures("nobody")
def test_a_circuit_opens_probes_and_closes(queue: Queue) -> None:
    queue.send_many(5)
    for claim in queue.claim(2):
        queue.fail(claim)
    assert queue.state() == "open"

    (probe,) = queue.claim(10, now=5)
    queue.complete(probe, now=5)

    assert queue.state() == "closed"
    assert queue.call("reset_circuit_breaker", "shop") is False


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators_are_not_held_up(queue: Queue, operation: str) -> None:
    OPERATIONS[operation](queue)


@pytest.mark.usefixtures("nobody")
def test_dead_letters_are_redriven_and_messages_replayed(queue: Queue) -> None:
    queue.bury(queue.send(ordering_key="k"))
    queue.send(ordering_key="k")
    queue.complete(queue.claim_one())

    assert queue.value("select messages from ulak.redrive()") == 1
    archived = queue.value("select id from ulak.archive where status = 'completed'")
    assert queue.call("replay_message", archived) > 0


def test_tables_can_not_be_locked_by_nobody(nobody: psycopg.Connection[Any]) -> None:
    for table in (
        "ulak.queue",
        "ulak.endpoints",
        "ulak_private.ordering_keys",
        "ulak_private.locks",
        "ulak.setting_values",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege), nobody.transaction():
            nobody.execute(f"lock {table} in access share mode")  # type: ignore[call-overload]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            nobody.execute(f"select from {table} for share")  # type: ignore[call-overload]


@pytest.mark.parametrize("lock", ["ulak_worker", "ulak_poller"])
def test_advisory_locks_hold_up_no_worker(own_site: Site, receiver: Receiver, lock: str) -> None:
    own_site.http("shop", receiver.url)
    with own_site.connect("nobody") as nobody:
        nobody.execute("select pg_advisory_lock(hashtext(%s), n) from generate_series(0, 32) n", [lock])
        nobody.execute("select pg_advisory_lock(hashtext(%s))", [lock])

        worker = own_site.start(slot=1)
        own_site.send()

        receiver.wait_for(1)
        assert own_site.value("select ulak_private.is_poller(1)")
        assert not worker.call.is_done()


def test_a_session_that_calls_itself_a_worker_or_a_watcher_is_neither(own_site: Site, receiver: Receiver) -> None:
    own_site.http("shop", receiver.url)
    with own_site.connect("nobody", application_name="ulak watcher") as nobody:
        nobody.execute("select 1")

        assert own_site.rows("select * from ulak_private.watchers()") == []
