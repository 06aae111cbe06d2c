"""What endpoints of every broker promise, like those of http: limits, order, slow start, dead letters, reports, secrets. All of them at
once, each a real one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest
from support.brokers import PROTOCOLS, Broker, broker, patience
from support.kafka import Kafka
from support.ports import closed_port
from support.receiver import Listener, Receiver
from support.sessions import wait_until
from support.site import PATIENT, UNBROKEN, Site

Brokers = dict[str, Broker]


@pytest.fixture
def brokers(request: pytest.FixtureRequest) -> Iterator[Brokers]:
    """By protocol, which is the name of their endpoint, too."""
    with ExitStack() as resources:
        yield {each: broker(each, request.getfixturevalue, resources) for each in PROTOCOLS}


def endpoints(site: Site, brokers: Brokers, policy: Any = None, **config: Any) -> None:
    for name, each in brokers.items():
        given = {"circuit_breaker": UNBROKEN, **each.config, **config}
        site.endpoint(name, given, policy or PATIENT, name)


def in_flight(site: Site) -> dict[str, int]:
    query = """
        select e.name, count(*) as messages
        from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
        where q.status = 'processing' group by e.name
    """
    return {row["name"]: row["messages"] for row in site.rows(query)}


def explained(site: Site, id: int) -> str:
    return "\n".join(row["what"] for row in site.rows("select what from ulak.explain(%s)", id))


def hang(brokers: Brokers) -> None:
    for each in brokers.values():
        each.hang()


def go_on(brokers: Brokers) -> None:
    for each in brokers.values():
        each.go_on()


def first_of_each(found: list[Any]) -> list[Any]:
    """Without what came again, as a consumer drops it."""
    return list(dict.fromkeys(each["n"] for each in found))


def test_brokers_that_hang_are_given_up_and_delay_no_other_and_no_key_loses_its_order(
    site: Site, brokers: Brokers, receiver: Receiver
) -> None:
    for name, each in brokers.items():
        site.endpoint(name, {"circuit_breaker": UNBROKEN, **each.config, **patience(name, 1)}, PATIENT, name)
    site.http("other", receiver.url)
    site.start()
    for name in brokers:
        site.wait_for_status(site.send(name, {"n": 0}, ordering_key="k"), "completed")

    hang(brokers)
    ids = {name: [site.send(name, {"n": n}, ordering_key="k") for n in (1, 2, 3)] for name in brokers}
    for hanging, *_ in ids.values():
        wait_until(lambda id=hanging: site.status(id) == "processing")
    for other in [site.send("other") for _ in range(20)]:
        site.wait_for_status(other, "completed")
    told = {name: site.wait_for_error(id, "[RETRYABLE]") for name, (id, *_) in ids.items()}
    behind = [site.message(id) for _, *later in ids.values() for id in later]
    stories = {name: explained(site, id) for name, (id, *_) in ids.items()}
    go_on(brokers)

    site.wait_until_settled()
    for name in ("amqp", "mqtt", "nats", "redis"):
        assert told[name] == f"[RETRYABLE] timeout: no acknowledgement from 127.0.0.1:{brokers[name].port} in time"
    assert told["kafka"].startswith(f"[RETRYABLE] kafka: {brokers['kafka'].config['broker']}: ")
    assert "_MSG_TIMED_OUT" in told["kafka"]
    assert {(each["status"], each["attempts"]) for each in behind} == {("pending", 0)}
    for name, story in stories.items():
        assert told[name] in story
    for each in brokers.values():
        assert first_of_each(each.read(4)) == [0, 1, 2, 3]


class SlowWay(Listener):
    """To a broker whose answers take long to arrive."""

    def __init__(self, to: int) -> None:
        self._to = to
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        with socket.create_connection(("127.0.0.1", self._to)) as there:
            threading.Thread(target=self._answer, args=(there, connection), daemon=True).start()
            while data := connection.recv(65536):
                there.sendall(data)
            there.shutdown(socket.SHUT_RDWR)

    def _answer(self, there: socket.socket, connection: socket.socket) -> None:
        with suppress(OSError):
            while (data := there.recv(65536)) and not self.wait(SLOW_SECONDS):
                connection.sendall(data)


SLOW_SECONDS = 0.2


def test_slow_brokers_are_waited_for(site: Site, brokers: Brokers, kafka: Kafka) -> None:
    with ExitStack() as ways:
        for name, each in brokers.items():
            # Kafka's clients go where the cluster tells them.
            port = each.port if name == "kafka" else ways.enter_context(SlowWay(each.port)).port
            site.endpoint(name, {"circuit_breaker": UNBROKEN, **each.at(port)}, PATIENT, name)
        kafka.slow_down(round(SLOW_SECONDS * 1000))
        for name in brokers:
            site.send_many(50, name)

        site.start()
        site.wait_until_settled()

    kafka.slow_down(0)
    found = site.rows("select status, attempts, count(*) from ulak.messages group by 1, 2")
    assert found == [{"status": "completed", "attempts": 1, "count": 50 * len(brokers)}]
    for each in brokers.values():
        assert sorted(one["n"] for one in each.read(50)) == list(range(1, 51))


@pytest.mark.parametrize("limit", ["max_in_flight", "slow_start_limit"])
def test_no_more_messages_are_in_flight_than_allowed(
    site: Site, brokers: Brokers, receiver: Receiver, limit: str
) -> None:
    endpoints(site, brokers, **({"max_in_flight": 3} if limit == "max_in_flight" else {}))
    site.http("other", receiver.url)
    if limit == "slow_start_limit":
        # As if a circuit had just closed, and two messages had been delivered since.
        site.db.execute("update ulak.endpoints set slow_start_limit = 3 where name <> 'other'")
    hang(brokers)
    for name in brokers:
        site.send_many(10, name)

    site.start()
    wait_until(lambda: in_flight(site) == dict.fromkeys(PROTOCOLS, 3), message="three of each in flight")
    # The worker has looked again meanwhile.
    site.wait_for_status(site.send("other"), "completed")
    still = in_flight(site)
    go_on(brokers)

    site.wait_until_settled()
    assert still == dict.fromkeys(PROTOCOLS, 3)
    for each in brokers.values():
        assert sorted(first_of_each(each.read(10))) == list(range(1, 11))


def test_after_an_outage_the_circuit_closes_and_what_is_in_flight_grows_from_one(site: Site, brokers: Brokers) -> None:
    rules = {"circuit_breaker": {"threshold": 3, "cooldown": 5}}
    at_once = {"backoff": "schedule", "schedule": [0], "max_retries": 100}
    for name, each in brokers.items():
        site.endpoint(name, {**each.at(closed_port()), **rules}, at_once, name)
        site.send_many(60, name)
    watch = """
        create function public.note() returns trigger language plpgsql as $$
        begin
            insert into public.noted
            select e.name, count(*) filter (where q.status = 'processing'), count(*) filter (where q.status = 'completed')
            from ulak.messages q join ulak.endpoints e on e.id = q.endpoint_id group by e.name;
            return null;
        end $$;
        create table public.noted (name text, in_flight bigint, delivered bigint);
        grant insert on public.noted to public;
        create trigger note after update or delete on ulak_private.deliveries execute function public.note()
    """
    site.start()
    for name in brokers:
        wait_until(lambda name=name: site.state(name) == "open", "an open circuit")
    # Whatever was in flight when it opened.
    wait_until(lambda: not in_flight(site))

    try:
        site.db.execute(watch)
        for name, each in brokers.items():
            site.call("alter_endpoint", name, {**each.config, **rules})
        site.db.execute("update ulak.endpoints set circuit_half_open_at = now()")
        site.wait_until_settled()
        noted = site.rows("select name, in_flight, min(delivered) as after from public.noted group by 1, 2")
    finally:
        site.db.execute("drop function if exists public.note() cascade; drop table if exists public.noted")

    for name, each in brokers.items():
        mine = {row["in_flight"]: row["after"] for row in noted if row["name"] == name}
        # n messages are in flight only after n - 1 have been delivered.
        assert {count: after for count, after in mine.items() if after < count - 1} == {}
        assert {1, 2} <= mine.keys()
        assert max(mine) > 4
        assert site.state(name) == "closed"
        assert sorted(first_of_each(each.read(60))) == list(range(1, 61))


def test_a_rate_limit_holds_and_is_named_as_the_reason(site: Site, brokers: Brokers, receiver: Receiver) -> None:
    endpoints(site, brokers, rate_limit={"limit": 1, "interval": "hour", "burst": 3})
    site.http("other", receiver.url)
    last = {name: site.send_many(10, name)[-1] for name in brokers}
    delivered = """
        select e.name from ulak.messages q join ulak.endpoints e on e.id = q.endpoint_id
        where q.status <> 'pending' group by 1 having bool_and(q.status = 'completed') and count(*) = 3
    """

    site.start()
    wait_until(lambda: set(site.column(delivered)) == set(PROTOCOLS), message="three of each")
    site.wait_for_status(site.send("other"), "completed")

    assert set(site.column(delivered)) - {"other"} == set(PROTOCOLS)
    for name, each in brokers.items():
        assert len(each.read(3)) == 3
        assert f'next: endpoint "{name}" is limited to 1.00 messages an hour' in explained(site, last[name])


# What the value of a field would make of a topic, a stream or a routing key.
BAD_VALUES: dict[str, dict[str, str]] = {
    "amqp": {"x" * 256: "routing_key is longer than 255 bytes", "\u20ac" * 90: "routing_key is longer than 255 bytes"},
    "kafka": {
        "a b": "topic must have 1 to 249 characters",
        "x" * 250: "topic must have 1 to 249 characters",
        "caf\u00e9": "topic must have 1 to 249 characters",
        "/": "topic must have 1 to 249 characters",
    },
    "mqtt": {
        "+": "topic must not have a wildcard (+ or #)",
        "a/#": "topic must not have a wildcard (+ or #)",
        "x" * 70_000: "topic is too long for MQTT",
        "\uffff": "topic has a character that a text of MQTT can't have",
    },
    "nats": {
        "a b": "subject must not have spaces, wildcards (* or >) or empty tokens",
        "a.>": "subject must not have spaces, wildcards (* or >) or empty tokens",
        "a..b": "subject must not have spaces, wildcards (* or >) or empty tokens",
        "$JS.API.STREAM.PURGE.ORDERS": "subject must not be one of the server's own",
        "x" * 1025: "subject must have at most 1024 bytes",
    },
    "redis": {"x" * 1030: "stream_key must have at most 1024 characters"},
}
ALWAYS_BAD: dict[Any, str] = {
    "": "has no tenant, which {route} asks for",
    None: "has no tenant, which {route} asks for",
    "a\nb": "has a control character in tenant, which {route} asks for",
    "a\x7fb": "has a control character in tenant, which {route} asks for",
    1.5: "has no text or number as tenant, which {route} asks for",
    True: "has no text or number as tenant, which {route} asks for",
}


def test_a_place_that_metadata_cannot_make_is_a_dead_letter_that_can_be_redriven(site: Site, brokers: Brokers) -> None:
    site.configure(max_metadata_size=100_000)
    wanted: dict[int, tuple[str, str]] = {}
    good: dict[str, int] = {}
    for name, each in brokers.items():
        place = each.config[each.route]
        site.endpoint(name, {"circuit_breaker": UNBROKEN, **each.config, each.route: "{tenant}"}, PATIENT, name)
        for value, told in {**BAD_VALUES[name], **ALWAYS_BAD}.items():
            metadata = {} if value is None else {"tenant": value}
            wanted[site.send(name, metadata=metadata)] = name, told.format(route=each.route)
        good[name] = site.send(name, {"n": "good"}, metadata={"tenant": place})

    worker = site.start()
    site.wait_until_settled()
    # It counts for the metrics at its end, too.
    site.call("stop")
    worker.result()

    for name, id in good.items():
        assert site.status(id) == "completed", site.message(id)["last_error"]
        assert [each["n"] for each in brokers[name].read(1)] == ["good"]
    for id, (name, told) in wanted.items():
        error = site.message(id)["last_error"]
        assert site.status(id) == "failed", (name, told)
        assert error.startswith("[PERMANENT] ") and told in error, (name, told, error)
        assert len(error) < 500
    assert site.value("select count(*) from ulak.dlq") == len(wanted)
    totals = {
        (row["labels"]["endpoint"], row["metric_name"]): row["metric_value"]
        for row in site.rows("select * from ulak.metrics() where metric_name like '%%_total' and labels ? 'endpoint'")
    }
    for name, each in brokers.items():
        failed = sum(of == name for of, _ in wanted.values())
        assert totals[name, "delivered_total"] == 1
        assert totals[name, "failed_attempts_total"] == failed
        # Once the config needs nothing of their metadata.
        site.call("alter_endpoint", name, {"circuit_breaker": UNBROKEN, **each.config})
        assert site.call("redrive_endpoint", name) == failed
    site.start()
    site.wait_until_settled()
    for name, each in brokers.items():
        arriving = 1 + sum(of == name for of, _ in wanted.values())
        assert len(each.read(arriving)) == arriving


def test_a_ping_reaches_an_endpoint_whose_place_depends_on_the_event(site: Site, brokers: Brokers) -> None:
    for name, each in brokers.items():
        site.endpoint(name, {**each.config, each.route: "{event_type}"}, None, name)
        site.endpoint(f"{name}-tenant", {**each.config, each.route: "{tenant}"}, None, name)

    for name, each in brokers.items():
        (pong,) = site.rows("select outcome, error from ulak.ping(%s)", name)
        (lost,) = site.rows("select outcome, error from ulak.ping(%s)", f"{name}-tenant")

        assert (pong["outcome"], pong["error"]) == ("delivered", None)
        assert lost["outcome"] == "failed"
        assert f"has no tenant, which {each.route} asks for" in lost["error"]


SECRET = "hush-hush-7f3a"


def test_no_secret_is_shown_anywhere(site: Site, brokers: Brokers) -> None:
    """Refused credentials, by name and as they are."""
    login = {"username": "somebody", "password": {"$secret": "password"}}
    sasl = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "somebody"}
    configs: dict[str, dict[str, Any]] = {
        "amqp": login,
        "kafka": {"options": {**sasl, "sasl.password": {"$secret": "password"}, "message.timeout.ms": 1000}},
        "mqtt": {**login, "will_topic": "gone"},
        "nats": {**login, "headers": {"x": {"$secret": "password"}}},
        "redis": login,
    }
    site.call("set_secret", "password", SECRET)
    logged = site.cluster.log.stat().st_size
    ids = []
    for name, each in brokers.items():
        config = {**each.config, **configs[name]}
        site.endpoint(name, config, {"max_retries": 0}, name)
        plain = json.loads(json.dumps(config).replace('{"$secret": "password"}', json.dumps(SECRET)))
        site.endpoint(f"{name}-plain", plain, {"max_retries": 0}, name)
        ids += [site.send(name), site.send(f"{name}-plain")]

    worker = site.start()
    site.wait_until_settled()
    pings = [site.rows("select * from ulak.ping(%s)", name) for name in brokers]

    # mosquitto and nats-server accept any password if none is configured.
    assert [site.status(id) for id in ids] == ["failed"] * 4 + ["completed"] * 4 + ["failed"] * 2
    looks = [
        "select * from ulak.queue",
        "select * from ulak.dlq",
        "select * from ulak.attempts",
        "select * from ulak.dlq_summary()",
        "select * from ulak.get_endpoint_health()",
        "select * from ulak.event_log",
        "select * from ulak.doctor()",
        "select * from ulak.metrics()",
        "select name, config from ulak.endpoints where name not like '%%-plain'",
    ]
    seen = {look: str(site.rows(look)) for look in looks}
    seen |= {f"explain({id})": explained(site, id) for id in ids}
    seen |= {"ping": str(pings), "notices": str(worker.notices)}
    with site.cluster.log.open("rb") as log:
        log.seek(logged)
        seen["log"] = log.read().decode(errors="replace")
    assert [look for look, text in seen.items() if SECRET in text] == []
    assert "WRONGPASS" in seen["ping"] or "AUTH" in seen["ping"]


# The keys that the documentation names.
KEYS: dict[str, str] = {
    "kafka": "broker topic allow_separators key partition headers options",
    "redis": """host port db username password stream_key allow_separators maxlen maxlen_approximate minid nomkstream connect_timeout
        command_timeout tls tls_ca_cert tls_cert tls_key""",
    "amqp": """host port vhost username password exchange routing_key allow_separators exchange_type persistent mandatory heartbeat frame_max tls
        tls_ca_cert tls_cert tls_key tls_verify_peer""",
    "mqtt": """broker port topic allow_separators qos retain client_id username password clean_session will_topic will_payload will_qos will_retain
        tls tls_ca_cert tls_cert tls_key tls_insecure""",
    "nats": """url subject allow_separators jetstream stream token username password nkey_seed credentials_file tls tls_ca_cert tls_cert tls_key
        headers options""",
}
SHARED = "max_in_flight rate_limit circuit_breaker"
EVENTS = "cloudevents cloudevents_mode cloudevents_type cloudevents_source cloudevents_subject"
SMALLEST: dict[str, dict[str, Any]] = {
    "kafka": {"broker": "kafka:9092", "topic": "orders"},
    "redis": {"host": "redis", "stream_key": "orders"},
    "amqp": {"host": "rabbit", "exchange": "orders"},
    "mqtt": {"broker": "mqtt", "topic": "orders"},
    "nats": {"url": "nats://n1:4222", "subject": "orders"},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_key_is_known_and_a_slip_of_the_pen_is_refused_with_the_key_that_was_meant(
    site: Site, protocol: str
) -> None:
    keys = [*KEYS[protocol].split(), *SHARED.split(), *(() if protocol == "redis" else EVENTS.split())]
    known = site.value("select ulak_private.config_schema(%s) -> 'properties'", protocol)
    validate = "select ulak.validate_endpoint_config(%s, %s)"

    assert [key for key in keys if key not in known] == []
    for key in keys:
        slip = f"{key[:-1]}z"
        with pytest.raises(psycopg.errors.InvalidParameterValue) as raised:
            site.db.execute(validate, [protocol, json.dumps({**SMALLEST[protocol], slip: True})])
        diag = raised.value.diag
        assert f"$.{slip} is not a known key" in f"{diag.message_primary}"
        assert f'Did you mean "{key}"?' in f"{diag.message_hint}", key


CREDENTIALS = {"username", "password", "token", "nkey_seed"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_secret_may_stand_where_a_credential_belongs_and_nowhere_else(site: Site, protocol: str) -> None:
    known = site.value("select ulak_private.config_schema(%s) -> 'properties'", protocol)
    texts = {key for key, schema in known.items() if "string" in schema.get("type", ())} - CREDENTIALS
    credentials: dict[str, Any] = {"username": {"$secret": "text"}, "password": {"$secret": "text"}}
    if protocol == "kafka":
        sasl = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": {"$secret": "text"}}
        credentials = {"headers": {"x": {"$secret": "text"}}, "options": {**sasl, "sasl.password": {"$secret": "text"}}}
    site.call("set_secret", "text", "orders")

    assert site.call("validate_endpoint_config", protocol, {**SMALLEST[protocol], **credentials}) is True
    assert len(texts) >= 3
    for key in texts:
        denied = site.refuses("validate_endpoint_config", protocol, {**SMALLEST[protocol], key: {"$secret": "text"}})
        assert denied.message_primary == f"invalid config of {protocol} endpoint: $.{key} must not be a secret"
