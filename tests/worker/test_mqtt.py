"""Endpoints of protocol mqtt: a worker publishes their messages to a real mosquitto."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psycopg
import pytest
from support.cluster import run
from support.mosquitto import Mosquitto, Subscriber, make_client
from support.receiver import Certificate, shown_by_client
from support.sessions import wait_until
from support.site import PATIENT, UNBROKEN, Site


@pytest.fixture
def subscriber(mosquitto: Mosquitto) -> Iterator[Subscriber]:
    with Subscriber(mosquitto) as subscriber:
        yield subscriber


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Mosquitto]:
    """One that a test may kill."""
    with Mosquitto(tmp_path / "mosquitto") as broker:
        yield broker


def endpoint(site: Site, broker: Mosquitto, name: str = "shop", policy: Any = None, **config: Any) -> int:
    config = {"broker": "127.0.0.1", "port": broker.port, "topic": "orders", **config}
    return site.endpoint(name, {"circuit_breaker": UNBROKEN, **config}, policy or PATIENT, "mqtt")


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_is_published_with_its_properties(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber, qos: int
) -> None:
    endpoint(site, mosquitto, qos=qos)
    site.start()

    id = site.send("shop", {"order": 7, "note": "caf\u00e9"}, headers={"x-tenant": "acme"}, generation=7)

    message = site.wait_for_status(id, "completed")
    (received,) = subscriber.wait_for(1)
    assert (received.topic, received.qos, received.retain) == ("orders", qos, False)
    assert json.loads(received.payload) == {"order": 7, "note": "caf\u00e9"}
    assert received.content_type == "application/json"
    assert received.properties["ulak-message-id"] == str(message["message_id"])
    assert received.properties["ulak-attempt"] == "1"
    assert received.properties["x-tenant"] == "acme"
    assert received.properties["ulak-generation"] == "7"


def test_the_topic_may_be_named_by_the_message(site: Site, mosquitto: Mosquitto, subscriber: Subscriber) -> None:
    endpoint(site, mosquitto, topic="orders/{event_type}")
    site.start()

    paid = site.send("shop", metadata={"event_type": "paid"})
    wild = site.send("shop", metadata={"event_type": "#"})

    site.wait_for_status(paid, "completed")
    site.wait_for_status(wild, "failed")
    assert subscriber.wait_for(1)[0].topic == "orders/paid"
    assert "must not have a wildcard" in site.dead(wild)["last_error"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_many_messages_are_each_published_once(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber, qos: int
) -> None:
    endpoint(site, mosquitto, qos=qos)
    site.send_many(300)

    site.start()
    site.wait_until_settled()

    received = subscriber.wait_for(300)
    assert sorted(json.loads(each.payload)["n"] for each in received) == list(range(1, 301))


def test_the_order_of_a_key_is_kept(site: Site, mosquitto: Mosquitto, subscriber: Subscriber) -> None:
    endpoint(site, mosquitto)
    for n in range(30):
        site.send("shop", {"n": n, "key": n % 3}, ordering_key=f"key {n % 3}")

    site.start()
    site.wait_until_settled()

    received = [json.loads(each.payload) for each in subscriber.wait_for(30)]
    for key in range(3):
        assert [each["n"] for each in received if each["key"] == key] == list(range(key, 30, 3))


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_event_is_written_by_the_binding(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber, mode: str
) -> None:
    endpoint(site, mosquitto, cloudevents=True, cloudevents_mode=mode, cloudevents_type="order.paid")
    site.start()

    message = site.wait_for_status(site.send("shop", {"order": 7}, headers={"x-type": "own"}), "completed")

    (received,) = subscriber.wait_for(1)
    assert ("type" in received.names) == (mode == "binary")
    body = json.loads(received.payload)
    event = body if mode == "structured" else received.properties
    assert (event["specversion"], event["type"], event["id"]) == ("1.0", "order.paid", str(message["message_id"]))
    assert (body["data"] if mode == "structured" else body) == {"order": 7}
    kind = "application/cloudevents+json" if mode == "structured" else "application/json"
    assert received.content_type is not None
    assert received.content_type.startswith(kind)


def test_a_retained_message_reaches_later_subscribers(site: Site, own: Mosquitto) -> None:
    endpoint(site, own, topic="state", retain=True)
    site.start()
    site.wait_for_status(site.send("shop", {"on": True}), "completed")

    with Subscriber(own, "state") as later:
        (received,) = later.wait_for(1)

    assert received.retain


def test_a_worker_that_leaves_says_goodbye_and_one_that_dies_has_a_will(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber
) -> None:
    endpoint(site, mosquitto, will_topic="gone", will_payload="the worker died", will_qos=1)
    leaving = site.start(seconds=2)
    site.wait_for_status(site.send("shop", {"n": 1}), "completed")
    leaving.result()
    dying = site.start()
    site.wait_for_status(site.send("shop", {"n": 2}), "completed")

    dying.end()

    received = subscriber.wait_for(3)
    assert [each.topic for each in received] == ["orders", "orders", "gone"]
    assert received[2].payload == b"the worker died"


def test_a_broker_that_is_down_gets_its_messages_later(site: Site, own: Mosquitto) -> None:
    endpoint(site, own)
    own.kill()
    site.start()

    ids = site.send_many(20)
    told = site.wait_for_error(ids[0], "connect: Connection refused")
    own.start()

    site.wait_until_settled()
    assert told == f"[RETRYABLE] connect: Connection refused (127.0.0.1:{own.port})"
    assert {site.status(id) for id in ids} == {"completed"}


def test_a_broker_that_was_restarted_costs_an_idle_connection_and_no_attempt(site: Site, own: Mosquitto) -> None:
    endpoint(site, own)
    site.start()
    site.wait_for_status(site.send(), "completed")

    own.kill()
    own.start()
    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1


def test_a_connection_that_the_broker_closes_costs_no_attempt(site: Site, mosquitto: Mosquitto) -> None:
    endpoint(site, mosquitto, client_id="only-one", clean_session=False)
    site.start()
    site.wait_for_status(site.send(), "completed")
    other = make_client("only-one")
    other.connect("127.0.0.1", mosquitto.port)
    wait_until(lambda: other.loop(0.1) == 0 and other.is_connected(), message="another client of the same id")

    message = site.wait_for_status(site.send(), "completed")

    assert message["attempts"] == 1


@pytest.mark.parametrize(("is_clean", "is_kept"), [(True, False), (False, True)])
def test_the_broker_keeps_a_session_that_is_not_clean(
    site: Site, mosquitto: Mosquitto, is_clean: bool, is_kept: bool
) -> None:
    name = f"kept-{uuid4()}"
    endpoint(site, mosquitto, client_id=name, clean_session=is_clean)
    site.start()
    site.wait_for_status(site.send(), "completed")
    site.call("stop")
    site.workers[0].result()

    with socket.create_connection(("127.0.0.1", mosquitto.port)) as later:
        assert greet(later, name) is is_kept


def test_what_a_dead_worker_left_in_its_session_swallows_no_message(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber
) -> None:
    """The broker takes a message of QoS 2 for one that it has, if its packet identifier is one that it holds."""
    name = f"dead-{uuid4()}"
    with socket.create_connection(("127.0.0.1", mosquitto.port)) as dead:
        greet(dead, name)
        # PUBLISH of QoS 2 with identifier 1, and no PUBREL after the answer.
        packet = b"\x00\x06orders" + b"\x00\x01" + b"\x00" + b'{"n": 1}'
        dead.sendall(b"\x34" + bytes([len(packet)]) + packet)
        assert dead.recv(2)[0] == 0x50
    endpoint(site, mosquitto, client_id=name, clean_session=False, qos=2, will_topic="gone")
    site.start()

    message = site.wait_for_status(site.send("shop", {"n": 1}), "completed")

    (received,) = subscriber.wait_for(1)
    assert received.topic == "orders"
    assert received.properties.get("ulak-message-id") == str(message["message_id"])


def greet(connection: socket.socket, client_id: str) -> bool:
    """As an MQTT 5 client that wants its session kept; returns whether the broker had one."""
    body = b"\x00\x04MQTT\x05\x00\x00\x3c" + b"\x05\x11\x00\x00\x0e\x10"
    body += len(client_id).to_bytes(2, "big") + client_id.encode()
    connection.sendall(b"\x10" + bytes([len(body)]) + body)
    kind, length = connection.recv(2)
    assert kind == 0x20
    flags, reason, *_ = connection.recv(length)
    assert reason == 0
    return bool(flags)


@pytest.mark.parametrize("character", ["\n", "\x85", "\uffff", "\U0001fffe"])
def test_a_text_that_would_cost_the_connection_fails_alone(
    site: Site, mosquitto: Mosquitto, subscriber: Subscriber, character: str
) -> None:
    """It is in an attribute of the event, which is a property."""
    endpoint(site, mosquitto, cloudevents=True)
    ids = [site.send("shop", ordering_key=key) for key in ("a", f"b{character}", "c")]

    site.start()
    site.wait_until_settled()

    assert [site.status(id) for id in ids] == ["completed", "failed", "completed"]
    assert "the message's partitionkey has a character" in site.dead(ids[1])["last_error"]
    assert {site.message(id)["attempts"] for id in ids} == {1}


def test_too_large_a_message_fails_for_good_and_its_neighbours_arrive(site: Site, tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "mosquitto", "max_packet_size 1000") as broker:
        endpoint(site, broker)
        ids = [site.send("shop", {"text": "x" * size}) for size in (10, 2000, 10)]

        site.start()
        site.wait_until_settled()

    assert [site.status(id) for id in ids] == ["completed", "failed", "completed"]
    assert "larger than the 1000 bytes" in site.dead(ids[1])["last_error"]


def test_a_message_that_the_broker_refuses_for_its_size_fails_for_good(site: Site, tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "mosquitto", "message_size_limit 1000") as broker:
        endpoint(site, broker)
        site.start()

        id = site.send("shop", {"text": "x" * 2000})
        site.wait_for_status(id, "failed")

    assert "packet too large (0x95)" in site.dead(id)["last_error"]


def test_a_topic_that_the_user_may_not_write_to_is_tried_again(site: Site, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic write orders\n")
    with Mosquitto(tmp_path / "mosquitto", f"acl_file {rules}") as broker:
        endpoint(site, broker, topic="{place}")
        site.start()

        allowed = site.send("shop", metadata={"place": "orders"})
        told = site.wait_for_error(site.send("shop", metadata={"place": "secret"}), "not authorized")

        assert told == f"[RETRYABLE] login: 127.0.0.1:{broker.port}: not authorized (0x87)"
        site.wait_for_status(allowed, "completed")


def test_credentials_are_those_of_the_config_and_not_shown(site: Site, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    run(["mosquitto_passwd", "-b", "-c", str(passwords), "ulak", "hunter2-hunter2"])
    site.call("set_secret", "mqtt-password", "hunter2-hunter2")
    with Mosquitto(tmp_path / "mosquitto", f"password_file {passwords}", "allow_anonymous false") as broker:
        endpoint(site, broker, username="ulak", password={"$secret": "mqtt-password"})
        endpoint(site, broker, "wrong", username="ulak", password="wrong-password")
        site.start()

        site.wait_for_status(site.send("shop"), "completed")
        told = site.wait_for_error(site.send("wrong"), "not authorized")

    assert told.startswith("[RETRYABLE]")
    assert "wrong-password" not in told


def test_tls_is_verified_on_both_sides_unless_told_otherwise(
    site: Site, tmp_path: Path, certificate: Certificate
) -> None:
    with Mosquitto(tmp_path / "mosquitto", certificate=certificate) as broker:
        authority, shown = {"tls_ca_cert": str(certificate.certificate)}, shown_by_client(certificate)
        endpoint(site, broker, "trusted", tls=True, **authority, **shown)
        endpoint(site, broker, "untrusted", tls=True, **shown)
        endpoint(site, broker, "careless", tls=True, tls_insecure=True, **shown)
        endpoint(site, broker, "nameless", tls=True, **authority)
        site.start()

        site.wait_for_status(site.send("trusted"), "completed")
        site.wait_for_status(site.send("careless"), "completed")
        untrusted = site.wait_for_error(site.send("untrusted"), "tls:")
        nameless = site.wait_for_error(site.send("nameless"), "tls:")

    assert untrusted == f"[RETRYABLE] tls: self-signed certificate (127.0.0.1:{broker.port})"
    assert nameless == f"[RETRYABLE] tls: 127.0.0.1:{broker.port}: tlsv13 alert certificate required"


def test_an_address_that_policy_forbids_is_not_dialled(site: Site, mosquitto: Mosquitto) -> None:
    site.configure(http_allowed_networks="10.0.0.0/8")
    endpoint(site, mosquitto)
    site.start()

    id = site.send()

    site.wait_for_status(id, "failed")
    assert site.dead(id)["last_error"].startswith("[PERMANENT] blocked: address 127.0.0.1 is blocked (loopback")


def test_a_ping_publishes_or_says_why_it_cannot(site: Site, own: Mosquitto) -> None:
    endpoint(site, own)

    (well,) = site.rows("select * from ulak.ping('shop')")
    own.kill()
    (down,) = site.rows("select * from ulak.ping('shop')")

    assert (well["outcome"], well["error"]) == ("delivered", None)
    assert down["outcome"] == "failed"
    assert "connect: Connection refused" in down["error"]


ONLY_3_1_1 = {5: b"\x20\x02\x00\x01", 4: b"\x20\x02\x00\x00"}


class SmallBroker:
    """Answers as told to a connection of each version of the protocol (4 is 3.1.1), and acknowledges what it gets."""

    def __init__(
        self, greetings: dict[int, bytes], refusals: list[int] | None = None, leaves_at: bytes | None = None
    ) -> None:
        self.greetings = greetings
        # It closes a connection that publishes to a topic with this in it.
        self.leaves_at = leaves_at
        # Reasons of the first acknowledgements.
        self.refusals = refusals or []
        self.versions: list[int] = []
        self.published: list[bytes] = []
        self.pings = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                while head := stream.read(1):
                    kind, packet = head[0] & 0xF0, stream.read(_length(stream))
                    if kind == 0x30 and self.leaves_at is not None and self.leaves_at in _topic(packet):
                        break
                    self._answer(connection, kind, packet)

    def _answer(self, connection: socket.socket, kind: int, packet: bytes) -> None:
        if kind == 0x10:
            self.versions.append(packet[6])
            connection.sendall(self.greetings[packet[6]])
        elif kind == 0x30:
            length = int.from_bytes(packet[:2], "big")
            if self.refusals:
                connection.sendall(b"\x40\x03" + packet[length + 2 : length + 4] + bytes([self.refusals.pop(0)]))
                return
            self.published.append(packet[length + 4 :])
            connection.sendall(b"\x40\x02" + packet[length + 2 : length + 4])
        elif kind == 0xC0:
            self.pings += 1
            connection.sendall(b"\xd0\x00")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._listening.close()


def _topic(packet: bytes) -> bytes:
    return packet[2 : 2 + int.from_bytes(packet[:2], "big")]


def _length(stream: Any) -> int:
    length = shift = 0
    while True:
        (byte,) = stream.read(1)
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return length


def test_a_broker_without_mqtt_5_gets_the_payload_alone(site: Site) -> None:
    with SmallBroker(ONLY_3_1_1) as broker:
        site.endpoint("shop", {"broker": "127.0.0.1", "port": broker.port, "topic": "orders"}, PATIENT, "mqtt")
        site.start()

        message = site.wait_for_status(site.send("shop", {"order": 7}), "completed")

    assert message["attempts"] == 1
    assert broker.versions == [5, 4]
    assert [json.loads(each) for each in broker.published] == [{"order": 7}]


def test_a_gateway_that_leaves_at_a_dot_in_the_topic_is_reported(site: Site) -> None:
    """As NATS' own did before version 2.10."""
    with SmallBroker(ONLY_3_1_1, leaves_at=b".") as gateway:
        config = {"broker": "127.0.0.1", "port": gateway.port, "topic": "shop.orders", "circuit_breaker": UNBROKEN}
        site.endpoint("shop", config, {"max_retries": 0}, "mqtt")
        site.start()

        id = site.send("shop")

        site.wait_for_status(id, "failed")
    assert site.dead(id)["last_error"].startswith("[RETRYABLE] mqtt: dotted: ")
    assert "shop.orders" in site.dead(id)["last_error"]
    advice = site.value("select fix from ulak.doctor() where \"check\" = 'failing'")
    assert "use slashes" in advice


def test_a_broker_that_is_full_is_tried_again(site: Site) -> None:
    with SmallBroker({5: b"\x20\x03\x00\x00\x00"}, [0x97]) as broker:
        site.endpoint("shop", {"broker": "127.0.0.1", "port": broker.port, "topic": "orders"}, PATIENT, "mqtt")
        site.start()

        id = site.send("shop")
        told = site.wait_for_error(id, "quota exceeded")
        site.wait_for_status(id, "completed")

    assert told == f"[RETRYABLE] mqtt: 127.0.0.1:{broker.port}: quota exceeded (0x97)"


def test_a_broker_without_memory_is_tried_again(site: Site, tmp_path: Path) -> None:
    # Later versions than 2.0.11 need more than half of it to begin with.
    with Mosquitto(tmp_path / "mosquitto", "memory_limit 1000000") as broker, Subscriber(broker, "orders") as away:
        # What is for a subscriber that is away is kept in memory.
        away.leave()
        endpoint(site, broker)
        ids = [site.send("shop", {"n": n, "text": "x" * 20_000}) for n in range(70)]
        site.start()
        query = "select min(last_error) from ulak.messages where last_error is not null"
        told = wait_until(lambda: site.value(query), message="a failure")
        broker.leave()
        broker.config = ()
        broker.start()

        site.wait_until_settled()
    assert told.startswith("[RETRYABLE] ")
    assert f"127.0.0.1:{broker.port} closed the connection" in told
    assert {site.status(id) for id in ids} == {"completed"}


def test_an_idle_connection_is_kept_alive(site: Site) -> None:
    # It asks for a sign of life every second.
    with SmallBroker({5: b"\x20\x06\x00\x00\x03\x13\x00\x01"}) as broker:
        site.endpoint("shop", {"broker": "127.0.0.1", "port": broker.port, "topic": "orders"}, PATIENT, "mqtt")
        site.start()
        site.wait_for_status(site.send("shop"), "completed")

        wait_until(lambda: broker.pings >= 2, "pings")

        site.wait_for_status(site.send("shop"), "completed")
    assert broker.versions == [5]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"topic": None}, "topic"),
        ({"topics": "orders"}, 'Did you mean "topic"?'),
        ({"topic": "orders/#"}, "must not have a wildcard"),
        ({"will_topic": "a/+"}, "must not have a wildcard"),
        ({"qos": 3}, "qos"),
        ({"will_qos": 1}, "has no effect without will_topic"),
        ({"broker": "tcp://127.0.0.1"}, "must be the name or the address of a host"),
        ({"password": "secret"}, "is required beside password"),
        ({"cloudevents": True, "cloudevents_source": "a\nb"}, "must not have control characters"),
        ({"clean_session": False}, 'is required with "clean_session": false'),
        ({"tls_insecure": True}, 'has no effect without "tls": true'),
    ],
)
def test_a_config_that_means_nothing_is_refused(site: Site, config: dict[str, Any], told: str) -> None:
    config = {"broker": "127.0.0.1", "topic": "orders", **config}
    given = {key: value for key, value in config.items() if value is not None}

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="invalid config of mqtt endpoint") as raised:
        site.call("create_endpoint", "shop", "mqtt", given)

    assert told in f"{raised.value.diag.message_primary} {raised.value.diag.message_hint}"
