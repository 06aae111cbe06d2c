"""What a role without any grant can do to others: everybody may take advisory locks, listen and notify, so nothing may depend on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.receiver import Receiver
from support.sessions import patience
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


# Notifications: channels have no rights.


def bodies(queue: Queue) -> str:
    query = "select prosrc from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    return "\n".join(queue.column(query))


def channels(queue: Queue) -> list[str]:
    """Every name that ulak's code could give to a channel, and others that somebody might look for."""
    named = re.findall(r"'([a-z][a-z0-9_.]{2,60})'|\b(ulak\w+)", bodies(queue))
    return sorted({each for pair in named for each in pair if each} | {"ulak", "ulak_events", "shop"})


def used_channels(queue: Queue) -> set[str]:
    """Those that a function listens to or notifies."""
    return set(re.findall(r"(?:notify\('|^\s*(?:un)?listen )(\w+)", bodies(queue), re.MULTILINE))


def listen(session: psycopg.Connection[Any], names: list[str]) -> None:
    session.execute("; ".join(f'listen "{name}"' for name in names))  # type: ignore[call-overload]


def heard(session: psycopg.Connection[Any]) -> set[tuple[str, str]]:
    """From others, until now: a notification of its own comes last."""
    session.execute("notify ulak_bell, 'the end'")
    told = set()
    for each in session.notifies(timeout=patience()):
        if each.pid == session.info.backend_pid:
            return told
        told.add((each.channel, each.payload))
    raise AssertionError("its own notification is missing")


def live_through_everything(queue: Queue) -> None:
    """Deliveries, retries, dead letters in every way, an open circuit, a full endpoint, digests, changes by administrators."""
    queue.endpoint("pager")
    queue.endpoint("small", {"max_pending": 1, "when_full": "dead_letter"})
    queue.endpoint("left")
    for event in ("ulak.message.dead", "ulak.endpoint.dead_letters", "ulak.endpoint.opened"):
        queue.call("subscribe", event, "pager")
    queue.call("set_secret", "token", "hush-token")
    queue.db.execute("select ulak_private.request_wake_ups()")
    queue.send_many(3, "small")
    queue.send("left")
    queue.db.execute("delete from ulak.endpoints where name = 'left'")
    queue.db.execute("select ulak_private.bury_orphans(now(), 10)")
    queue.bury(queue.send("shop"))
    queue.complete(queue.claim_one(endpoint="small"))
    for _ in range(3):
        queue.send("shop")
        for claim in queue.claim(1, endpoint="shop"):
            queue.fail(claim)
    queue.send("limited")
    queue.claim_one(endpoint="limited", lease=1)
    queue.recover(now=2)
    queue.call("disable_endpoint", "limited")
    queue.call("enable_endpoint", "limited")
    queue.db.execute("call ulak.run_maintenance()")
    queue.call("redrive_message", queue.value("select min(id) from ulak.dlq where endpoint_name = 'shop'"))


def test_a_role_that_may_only_connect_hears_nothing_but_the_bell(queue: Queue, connect: Connect) -> None:
    eavesdropper = connect("nobody")
    listen(eavesdropper, channels(queue))

    live_through_everything(queue)

    assert queue.value("select count(*) from ulak.event_log where event = 'message.dead'") >= 5
    assert heard(eavesdropper) == {("ulak_bell", "")}


def test_a_forged_notification_changes_nothing_for_anybody(own_site: Site, receiver: Receiver) -> None:
    """Nobody can be told anything by a channel: the only one is a bell, and those who listen to it just look again."""
    own_site.http("shop", receiver.url)
    own_site.endpoint("pager")
    own_site.call("subscribe", "ulak.message.dead", "pager")
    own_site.call("subscribe", "ulak.endpoint.dead_letters", "pager")
    worker = own_site.start()
    own_site.wait_for_status(own_site.send(), "completed")
    tables = ("queue", "dlq", "event_log", "attempts", "setting_values", "subscriptions")
    states = "; ".join(
        f"select coalesce(array_agg(t::text order by t::text), '{{}}') from ulak.{name} t" for name in tables
    )
    before = [own_site.value(state) for state in states.split("; ")]
    forged = (
        '{"event": "message.dead", "endpoint": "shop", "messages": 1, "last": 1, "error": "forged", "sender": "shop"}'
    )

    with own_site.connect("nobody") as nobody:
        for name in channels(own_site):
            nobody.execute("select pg_notify(%s, p) from unnest(array['', '1', 'stop', %s]) p", [name, forged])

    own_site.db.execute("call ulak.run_maintenance()")
    assert [own_site.value(state) for state in states.split("; ")] == before
    assert used_channels(own_site) == {"ulak_bell"}
    own_site.wait_for_status(own_site.send(), "completed")
    assert len(receiver.requests) == 2
    assert not worker.call.is_done()
