"""Endpoints of protocol kafka: a worker produces to a real cluster, and a consumer reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer
from support.kafka import (
    NOT_ENOUGH_REPLICAS,
    PRODUCE,
    STORAGE_ERROR,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC,
    Consumed,
    Kafka,
    Relay,
)
from support.receiver import Certificate, Receiver, make_certificate
from support.sessions import wait_until
from support.site import PATIENT, Site
from ulak.messages.delivery import EndpointConfig
from ulak.transports.broker.target import Defaults
from ulak.transports.kafka.target import Target

# Retries come when a test wants them.
LATER = {"backoff": "fixed", "base_delay_seconds": 3600}
PARTITIONS = 4


class Bus:
    """A topic, and an endpoint of its own."""

    def __init__(self, site: Site, kafka: Kafka) -> None:
        self.site = site
        self.kafka = kafka
        self.topic = kafka.create_topic(f"topic-{uuid4()}", PARTITIONS)

    def endpoint(self, name: str = "bus", policy: Any = None, **config: Any) -> int:
        given = {"broker": self.kafka.broker, "topic": self.topic, **config}
        return self.site.endpoint(name, given, policy, "kafka")

    def read(self, count: int) -> list[Consumed]:
        return self.kafka.read(self.topic, count, PARTITIONS)


@pytest.fixture
def bus(site: Site, kafka: Kafka) -> Bus:
    return Bus(site, kafka)


def options(**given: Any) -> dict[str, Any]:
    """librdkafka's names have dots."""
    return {"options": {name.replace("_", "."): value for name, value in given.items()}}


def test_a_message_arrives_with_its_id_and_its_headers(site: Site, bus: Bus) -> None:
    bus.endpoint(headers={"origin": "shop"})
    site.start(seconds=60)
    correlation = uuid4()

    id = site.value(
        "select ulak.send('bus', %s, p_headers => %s, p_correlation_id => %s, p_ordering_key => 'c-7',"
        " p_generation => 7)",
        json.dumps({"order": 7, "note": "caf\u00e9"}),
        json.dumps({"tenant": "acme"}),
        correlation,
    )

    message = site.wait_for_status(id, "completed")
    (found,) = bus.read(1)
    assert json.loads(found.value) == {"order": 7, "note": "caf\u00e9"}
    assert found.key == "c-7"
    assert found.headers.pop("ulak-created-at")[10] == "T"
    assert found.headers == {
        "ulak-message-id": str(message["message_id"]),
        "ulak-attempt": "1",
        "ulak-correlation-id": str(correlation),
        "ulak-generation": "7",
        "content-type": "application/json",
        "origin": "shop",
        "tenant": "acme",
    }


def test_the_order_of_a_key_is_kept_within_its_partition(site: Site, bus: Bus) -> None:
    bus.endpoint()
    for n in range(20):
        for key in ("a", "b"):
            site.value("select ulak.send('bus', %s, p_ordering_key => %s)", json.dumps({"n": n}), key)

    site.start(seconds=60)
    site.wait_until_settled()

    found = bus.read(40)
    for key in ("a", "b"):
        mine = sorted((each for each in found if each.key == key), key=lambda each: each.offset)
        assert [json.loads(each.value)["n"] for each in mine] == list(range(20))
        assert len({each.partition for each in mine}) == 1


def test_topic_key_and_partition_come_from_the_config(site: Site, bus: Bus, kafka: Kafka) -> None:
    bus.endpoint(topic=bus.topic.replace("topic", "{kind}"), key="{customer}", partition=2)
    ids = [
        site.value("select ulak.send('bus', '{}', p_metadata => %s)", json.dumps(each))
        for each in (
            {"kind": "topic", "customer": 12},
            {"kind": "topic"},
            {"kind": "no/slash", "customer": 1},
        )
    ]

    site.start(seconds=60)
    site.wait_until_settled()

    (found,) = bus.read(1)
    assert (found.key, found.partition) == ("12", 2)
    assert [site.status(id) for id in ids] == ["completed", "failed", "failed"]
    assert "has no customer, which key asks for" in site.message(ids[1])["last_error"]
    assert site.message(ids[2])["last_error"].startswith("[PERMANENT] message: topic must have 1 to 249 characters")


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_a_message_is_a_cloud_event(site: Site, bus: Bus, mode: str) -> None:
    bus.endpoint(cloudevents=True, cloudevents_mode=mode, cloudevents_source="/shop", cloudevents_type="order.paid")

    id = site.value("select ulak.send('bus', '{\"n\": 1}', p_ordering_key => 'k')")
    site.start(seconds=60)
    message = site.wait_for_status(id, "completed")

    (found,) = bus.read(1)
    if mode == "binary":
        event = {name.removeprefix("ce_"): value for name, value in found.headers.items() if name.startswith("ce_")}
        assert found.headers["content-type"] == "application/json"
        assert json.loads(found.value) == {"n": 1}
    else:
        event = json.loads(found.value)
        assert found.headers["content-type"] == "application/cloudevents+json"
        assert event["data"] == {"n": 1}
    wanted = {"specversion": "1.0", "id": str(message["message_id"]), "source": "/shop", "type": "order.paid"}
    assert wanted.items() <= event.items()
    assert (event["partitionkey"], found.key) == ("k", "k")


def test_a_raw_body_is_produced_as_it_was_given(site: Site, bus: Bus) -> None:
    bus.endpoint()

    site.value(
        "select ulak.send('bus', p_raw => %s, p_content_type => 'text/csv')",
        "a;b\n1;2\n",
    )
    site.start(seconds=60)
    site.wait_until_settled()

    (found,) = bus.read(1)
    assert found.value == b"a;b\n1;2\n"
    assert found.headers["content-type"] == "text/csv"


def test_many_messages_arrive_once_over_one_connection_beside_another_protocol(
    site: Site, bus: Bus, kafka: Kafka, receiver: Receiver
) -> None:
    site.http("shop", receiver.url)
    with Relay(kafka) as relay:
        bus.endpoint(broker=relay.broker)
        site.db.execute(
            "select ulak.send_batch('bus', array(select jsonb_build_object('n', n) from generate_series(1, 2000) n))"
        )
        site.db.execute(
            "select ulak.send_batch('shop', array(select jsonb_build_object('n', n) from generate_series(1, 100) n))"
        )
        site.start(seconds=60)
        site.wait_until_settled()

        found = bus.read(2000)
        connections = relay.connections

    assert sorted(json.loads(each.value)["n"] for each in found) == list(range(1, 2001))
    assert len({each.headers["ulak-message-id"] for each in found}) == 2000
    assert len(receiver.requests) == 100
    # librdkafka has one more for the first question.
    assert connections <= 2


def test_a_broker_that_is_down_is_a_failure_that_is_tried_again(site: Site, bus: Bus, kafka: Kafka) -> None:
    kafka.down()
    bus.endpoint(policy=LATER)
    id = site.send("bus", {"n": 1})

    site.start(seconds=60)
    wait_until(lambda: site.message(id)["last_error"], message="a failure")

    message = site.message(id)
    assert message["last_error"].startswith("[RETRYABLE] network: ")
    assert kafka.broker in message["last_error"] and "Connection refused" in message["last_error"]
    assert message["status"] == "pending"
    kafka.up()
    site.db.execute("select ulak.reschedule(%s, now())", [id])
    site.wait_for_status(id, "completed")


def test_what_is_under_way_when_a_broker_restarts_arrives(site: Site, bus: Bus, kafka: Kafka) -> None:
    bus.endpoint()
    site.start(seconds=60)
    site.wait_for_status(site.send("bus", {"n": 0}), "completed")

    kafka.down()
    ids = [site.send("bus", {"n": n}) for n in range(1, 21)]
    wait_until(lambda: site.value("select count(*) = 20 from ulak.queue where status = 'processing'"))
    kafka.up()

    site.wait_until_settled()
    assert {site.message(id)["attempts"] for id in ids} == {1}
    assert sorted(json.loads(each.value)["n"] for each in bus.read(21)) == list(range(21))


@pytest.mark.parametrize("error", [STORAGE_ERROR, NOT_ENOUGH_REPLICAS], ids=["disk", "replicas"])
def test_a_cluster_that_cannot_store_is_asked_again(site: Site, bus: Bus, kafka: Kafka, error: int) -> None:
    bus.endpoint()
    kafka.fail(PRODUCE, error, error)

    id = site.send("bus", {"n": 1})
    site.start(seconds=60)

    # By librdkafka, within the message's time.
    assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert len(bus.read(1)) == 1


def test_a_topic_that_may_not_be_written_is_tried_again(site: Site, bus: Bus, kafka: Kafka) -> None:
    bus.endpoint(policy=LATER)
    kafka.fail(PRODUCE, TOPIC_AUTHORIZATION_FAILED)

    id = site.send("bus", {"n": 1})
    site.start(seconds=60)
    wait_until(lambda: site.message(id)["last_error"], message="a failure")

    assert site.message(id)["last_error"].startswith("[RETRYABLE] login: ")
    assert "TOPIC_AUTHORIZATION_FAILED" in site.message(id)["last_error"]


def test_a_topic_that_does_not_exist_is_tried_again(site: Site, bus: Bus, kafka: Kafka) -> None:
    kafka.refuse_topic(bus.topic, UNKNOWN_TOPIC)
    bus.endpoint(policy=LATER, **options(topic_metadata_propagation_max_ms=0))

    id = site.send("bus", {"n": 1})
    site.start(seconds=60)
    wait_until(lambda: site.message(id)["last_error"], message="a failure")

    assert site.message(id)["last_error"].startswith("[RETRYABLE] kafka: ")
    assert "UNKNOWN_TOPIC" in site.message(id)["last_error"]


def test_a_message_that_is_too_large_fails_for_good_and_the_others_of_its_delivery_arrive(site: Site, bus: Bus) -> None:
    bus.endpoint(**options(message_max_bytes=20_000))
    ids = [site.send("bus", {"n": n, "text": "x" * (50_000 if n == 2 else 10)}) for n in range(5)]

    site.start(seconds=60)
    site.wait_until_settled()

    assert [site.status(id) for id in ids] == ["completed", "completed", "failed", "completed", "completed"]
    error = site.message(ids[2])["last_error"]
    assert error.startswith("[PERMANENT] message: kafka: ") and "MSG_SIZE_TOO_LARGE" in error


def test_ping_produces_one_message(site: Site, bus: Bus, kafka: Kafka) -> None:
    bus.endpoint()

    (pong,) = site.rows("select * from ulak.ping('bus')")

    assert (pong["outcome"], pong["error"]) == ("delivered", None)
    assert [json.loads(each.value) for each in bus.read(1)] == [{"type": "ulak.ping"}]
    kafka.down()
    (pong,) = site.rows("select * from ulak.ping('bus')")
    assert pong["outcome"] == "failed" and "Connection refused" in pong["error"]


def test_a_run_leaves_no_thread_behind_in_its_session(site: Site, bus: Bus) -> None:
    bus.endpoint()
    worker = site.start(seconds=60)
    site.wait_for_status(site.send("bus", {"n": 1}), "completed")
    assert producer_threads(worker.pid)

    # Changed settings end one worker and begin another, in the same session; then it is told to leave.
    site.configure(worker_concurrency=7)
    site.wait_for_status(site.send("bus", {"n": 2}), "completed")
    site.db.execute("select ulak.stop()")
    worker.result()

    def has_ended() -> bool:
        # On a busy machine the end of the run may not have waited long enough; whenever Python runs again, they end.
        worker.connection.execute("call ulak.run_worker()")
        return not producer_threads(worker.pid)

    assert not producer_threads(worker.pid) or wait_until(has_ended, message="the end of its threads")


def test_a_session_with_producers_ends_without_the_exit_handlers_of_libraries(site: Site, bus: Bus) -> None:
    """OpenSSL's frees what librdkafka's threads are using, and the whole server crashes with them. Here abort() stands
    for it, which fails every time."""
    site.db.execute(
        "create function abort_at_exit() returns void language plpython3u as"
        " $$import ctypes; libc = ctypes.CDLL(None); libc.on_exit(libc.abort, None)$$"
    )
    bus.endpoint()
    with site.connect() as session:
        session.execute("select abort_at_exit()")
        session.execute("select ulak.ping('bus')")
        pid = session.info.backend_pid
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), message="the end of the session")

    assert site.value("select 1") == 1
    assert f"(PID {pid}) was terminated by signal" not in site.cluster.log.read_text(errors="replace")


def producer_threads(pid: int) -> list[str]:
    """Those of librdkafka."""
    names = [(task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [name for name in names if name.startswith("rdk:")]


def test_credentials_are_shown_and_kept_secret(site: Site, bus: Bus, kafka: Kafka, certificate: Certificate) -> None:
    site.db.execute("select ulak.set_secret('kafka', 'right battery')")
    with Relay(kafka, certificate, users={"ulak": "right battery"}) as relay:
        secure = {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "ulak",
            "sasl.password": {"$secret": "kafka"},
            "ssl.ca.location": str(certificate.certificate),
            "broker.address.family": "v4",
        }
        bus.endpoint(broker=f"localhost:{relay.port}", policy=LATER, options=secure)
        site.start(seconds=60)
        site.wait_for_status(site.send("bus", {"n": 1}), "completed")

        site.db.execute("select ulak.set_secret('kafka', 'wrong horse')")
        refused = site.send("bus", {"n": 2})
        wait_until(lambda: site.message(refused)["last_error"], message="a failure")

    error = site.message(refused)["last_error"]
    assert error.startswith("[RETRYABLE] login: ") and "SASL authentication error" in error
    assert "horse" not in error


def test_tls_is_verified_on_both_sides_unless_told_otherwise(
    site: Site, bus: Bus, kafka: Kafka, certificate: Certificate
) -> None:
    client = make_certificate(certificate.key.parent, ("client",), file="client", authority=certificate)
    authority = {"ssl.ca.location": str(certificate.certificate)}
    shown = {"ssl.certificate.pem": client.certificate.read_text(), "ssl.key.location": str(client.key)}
    wanted: dict[str, tuple[dict[str, Any], str]] = {
        "trusted": ({**authority, **shown}, ""),
        "careless": ({"enable.ssl.certificate.verification": False, **shown}, ""),
        "untrusted": (shown, "certificate verify failed"),
        "misnamed": ({**authority, **shown}, "certificate verify failed"),
        # The relay doesn't say why it hangs up, and what librdkafka makes of that depends on its version.
        "nameless": (authority, "network: "),
    }
    # The certificate is for localhost and 127.0.0.1.
    with (
        Relay(kafka, certificate, certificate) as relay,
        Relay(kafka, certificate, certificate, host="127.0.0.2") as misnamed,
    ):
        ids = {}
        for name, (options, _) in wanted.items():
            broker = misnamed.broker if name == "misnamed" else f"localhost:{relay.port}"
            secure = {"security.protocol": "ssl", "broker.address.family": "v4", **options}
            bus.endpoint(name, LATER, broker=broker, options=secure)
            ids[name] = site.send(name, {"name": name})
        site.start(seconds=60)
        for name, (_, told) in wanted.items():
            if told:
                assert site.wait_for_error(ids[name], told).startswith("[RETRYABLE] network: ")
            else:
                site.wait_for_status(ids[name], "completed")

    assert {json.loads(each.value)["name"] for each in bus.read(2)} == {"trusted", "careless"}


def test_an_unsuitable_file_is_not_opened_by_librdkafka(site: Site, bus: Bus) -> None:
    ids = []
    for name, path in {"device": "/dev/zero", "missing": "/nowhere", "other": "/etc/hostname"}.items():
        bus.endpoint(name, LATER, options={"security.protocol": "ssl", "ssl.ca.location": path})
        ids.append(site.send(name, {"n": 1}))

    site.start(seconds=60)
    for id in ids:
        wait_until(lambda id=id: site.message(id)["last_error"], message="a failure")

    for id in ids:
        error = site.message(id)["last_error"]
        assert error.startswith("[RETRYABLE] config: a file that the config names can't be used")


def test_a_forbidden_address_is_not_dialled(site: Site, bus: Bus, kafka: Kafka) -> None:
    site.configure(http_allowed_networks="127.0.0.2/32")
    with Relay(kafka) as relay:
        bus.endpoint(broker=relay.broker)
        id = site.send("bus", {"n": 1})
        site.start(seconds=60)
        message = site.wait_for_status(id, "failed")

    assert message["last_error"].startswith(
        f"[PERMANENT] blocked: {relay.broker}: address 127.0.0.1 is blocked (loopback"
    )
    assert relay.connections == 0


def test_a_forbidden_broker_that_the_cluster_names_is_not_dialled(site: Site, bus: Bus, kafka: Kafka) -> None:
    site.configure(http_allowed_networks="127.0.0.1/32")
    with (
        Relay(kafka, host="127.0.0.2", advertised_host="127.0.0.2") as forbidden,
        Relay(kafka, advertised_host="127.0.0.2", advertised_port=forbidden.port) as relay,
    ):
        bus.endpoint(broker=relay.broker)
        id = site.send("bus", {"n": 1})
        site.start(seconds=60)
        message = site.wait_for_status(id, "failed")

    named = f"the cluster names broker {forbidden.broker}: address 127.0.0.2 is blocked (loopback"
    assert message["last_error"].startswith(f"[PERMANENT] blocked: {named}")
    assert forbidden.connections == 0


def test_a_host_that_is_not_allowed_is_not_dialled(site: Site, bus: Bus, kafka: Kafka) -> None:
    with (
        Relay(kafka, host="127.0.0.2", advertised_host="127.0.0.2") as forbidden,
        Relay(kafka, advertised_host="127.0.0.2", advertised_port=forbidden.port) as relay,
    ):
        bus.endpoint(policy=PATIENT, broker=relay.broker)
        id = site.send("bus", {"n": 1})
        site.configure(http_allowed_hosts="localhost")
        site.start(seconds=60)
        site.wait_for_error(id, "[RETRYABLE] config: host 127.0.0.1 is not listed in http_allowed_hosts")
        connections = relay.connections
        site.configure(http_allowed_hosts="127.0.0.1")
        named = f"the cluster names broker {forbidden.broker}: host 127.0.0.2 is not listed in http_allowed_hosts"
        site.wait_for_error(id, f"[RETRYABLE] config: {named}")

    assert connections == 0
    assert forbidden.connections == 0


def test_a_broker_that_the_cluster_names_gets_no_secret_that_is_bound_to_others(
    site: Site, bus: Bus, kafka: Kafka
) -> None:
    site.db.execute("select ulak.set_secret('kafka', 'hush-hush', p_hosts => '{127.0.0.1}')")
    with (
        Relay(kafka, host="127.0.0.2", advertised_host="127.0.0.2") as other,
        Relay(kafka, advertised_host="127.0.0.2", advertised_port=other.port) as relay,
    ):
        bus.endpoint(broker=relay.broker, headers={"x-key": {"$secret": "kafka"}})
        id = site.send("bus", {"n": 1})
        site.start(seconds=60)
        told = site.wait_for_error(id, "names broker")

    problem = "host 127.0.0.2 may not learn of a secret that is bound to other hosts"
    assert told == f"[RETRYABLE] config: the cluster names broker {other.broker}: {problem}"
    assert other.connections == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"broker": "kafka"}, r"\$\.broker must be host:port"),
    ({"broker": "kafka:0"}, r"\$\.broker must be host:port"),
    ({"broker": "http://kafka:9092"}, r"\$\.broker must be host:port"),
    ({"topic": "no spaces"}, r"\$\.topic must have at most 249"),
    ({"topic": "a.{b"}, r"\$\.topic has a brace"),
    ({"partition": -1}, r"\$\.partition must be at least 0"),
    ({"headers": {"ulak-message-id": "1"}}, "is a header that ulak sets itself"),
    ({"topics": "a"}, r"\$\.topics is not a known key"),
    ({"options": {"linger": 1}}, r"\$\.options\.linger is not a known key"),
    ({"options": {"plugin.library.paths": "/tmp/x.so"}}, "is not a known key"),
    ({"options": {"ssl.engine.location": "/tmp/x.so"}}, "is not a known key"),
    ({"options": {"sasl.kerberos.kinit.cmd": "touch /tmp/x"}}, "is not a known key"),
    ({"options": {"sasl.oauthbearer.method": "oidc"}}, "is not a known key"),
    ({"options": {"test.mock.num.brokers": 3}}, "is not a known key"),
    ({"options": {"bootstrap.servers": "kafka:9092"}}, "is not a known key"),
    ({"options": {"acks": "1"}}, "must be one of"),
    ({"options": {"enable.idempotence": False}}, "must be one of"),
    ({"options": {"linger.ms": "1000"}}, "must be at most 900"),
    ({"options": {"linger.ms": "soon"}}, "must be of type integer"),
    ({"options": {"linger.ms": 1, "queue.buffering.max.ms": 2}}, "must not stand beside linger.ms"),
    ({"options": {"reconnect.backoff.ms": 500, "reconnect.backoff.max.ms": 200}}, "must not exceed"),
    ({"options": {"client.id": "a\nb"}}, "must not have control characters"),
    ({"options": {"sasl.password": "x"}}, "has no effect without"),
    ({"options": {"security.protocol": "sasl_ssl"}}, "is required with"),
    ({"options": {"ssl.ca.location": "/ca.pem"}}, "has no effect without"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"broker": ["a:9092", "[::1]:9093"]},
    {"broker": "a:9092, b.example.com:9092"},
    {"topic": "{event_type}", "key": "{customer_id}"},
    {"options": {"acks": "all", "enable.idempotence": True, "compression.type": "lz4", "linger.ms": "5"}},
    {"cloudevents": True, "max_in_flight": 2, "rate_limit": {"limit": 10}},
]


def test_a_config_that_means_nothing_is_refused(site: Site) -> None:
    for config, problem in REFUSED:
        given = {"broker": "kafka:9092", "topic": "orders", **config}
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=problem):
            site.db.execute("select ulak.validate_endpoint_config('kafka', %s)", [json.dumps(given)])


def test_every_option_is_one_that_librdkafka_takes(site: Site) -> None:
    schema = site.value("select ulak_private.kafka_options_schema()")["properties"]
    # With it librdkafka looks whether it has the mechanism.
    login = {
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "p",
        "security.protocol": "sasl_plaintext",
    }
    texts = {"ssl.cipher.suites": "HIGH", "ssl.curves.list": "P-256", "ssl.sigalgs.list": "RSA+SHA256"}
    for name, allowed in schema.items():
        if not name.endswith((".location", ".pem")):
            bounds = [allowed[bound] for bound in ("minimum", "maximum") if bound in allowed]
            for value in allowed.get("enum") or bounds or [texts.get(name, "text")]:
                given = {"broker": "127.0.0.1:1", "topic": "t", "options": {**login, name: value}}
                made = Target(EndpointConfig(1, "bus", 1, given), Defaults("1.0", 10.0, "/ulak"))
                Producer({**made.properties, "bootstrap.servers": "127.0.0.1:1"})


def test_a_config_of_the_right_shape_is_accepted(site: Site) -> None:
    for config in ACCEPTED:
        given = {"broker": "kafka:9092", "topic": "orders", **config}
        assert site.value("select ulak.validate_endpoint_config('kafka', %s)", json.dumps(given)) is True
