"""Endpoints of protocol amqp: a worker publishes their messages to a real RabbitMQ, which confirms them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.ports import closed_port
from support.rabbitmq import PASSWORD, POWERLESS, USER, RabbitMQ
from support.receiver import Receiver, make_certificate, shown_by_client
from support.sessions import wait_until
from support.site import Site

_numbers = itertools.count(1)
ONCE = {"max_retries": 0}
AT_ONCE = {"backoff": "schedule", "schedule": [0], "max_retries": 100}
ACCEPTED = "accepting AMQP connection"
LATER = {"backoff": "fixed", "base_delay_seconds": 600}


@pytest.fixture
def exchange(rabbitmq: RabbitMQ) -> Iterator[str]:
    """A topic exchange, and a queue of the same name that gets all of it."""
    name = f"orders-{next(_numbers)}"
    rabbitmq.declare(name)
    yield name
    rabbitmq.delete(name)


def endpoint(site: Site, rabbitmq: RabbitMQ, exchange: str, policy: Any = None, /, **config: Any) -> None:
    given = rabbitmq.config(exchange=exchange, routing_key="order.created") | config
    site.endpoint("shop", {key: value for key, value in given.items() if value is not None}, policy, "amqp")


def error_of(site: Site, id: int) -> str:
    """Of its first failure."""
    wait_until(lambda: site.message(id)["last_error"], "an error")
    return str(site.message(id)["last_error"])


# What arrives.


def test_a_message_is_confirmed_and_a_consumer_can_read_it(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange)
    site.start()

    options = {"headers": {"x-shop": "north"}, "ordering_key": "customer 7", "generation": 7}
    id = site.send("shop", {"order": 7, "note": "café"}, **options)

    message = site.wait_for_status(id, "completed")
    (found,) = rabbitmq.take(exchange)
    assert found.routing_key == "order.created"
    assert json.loads(found.body) == {"order": 7, "note": "café"}
    properties = found.properties
    assert properties.message_id == str(message["message_id"])
    assert (properties.content_type, properties.delivery_mode) == ("application/json", 2)
    assert properties.timestamp == int(message["created_at"].timestamp())
    assert properties.headers == {
        "ulak-attempt": 1,
        "ulak-generation": "7",
        "ulak-ordering-key": "customer 7",
        "x-shop": "north",
    }


def test_an_event_carries_its_type_and_its_correlation(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, routing_key="shop.{event_type}")
    site.call("create_event_type", "rabbit.paid")
    site.call("subscribe", "rabbit.paid", "shop")
    correlation = "0190a5d2-5b9e-7000-8000-000000000007"
    site.start()

    site.call("publish", "rabbit.paid", {"order": 7}, correlation_id=correlation)
    site.wait_until_settled()

    (found,) = rabbitmq.take(exchange)
    assert (found.routing_key, found.properties.type) == ("shop.rabbit.paid", "rabbit.paid")
    assert found.properties.correlation_id == correlation
    assert found.properties.headers["ulak-event-type"] == "rabbit.paid"


def test_many_messages_arrive_once_each(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange)
    ids = site.send_many(3000)
    site.start()

    site.wait_until_settled()

    assert {row["status"] for row in site.rows("select distinct status from ulak.messages")} == {"completed"}
    assert rabbitmq.depth(exchange) == len(ids)


def test_the_order_of_a_key_is_kept(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange)
    for n in range(20):
        site.send("shop", {"n": n}, ordering_key="k")

    site.start()
    site.wait_until_settled()

    assert [json.loads(each.body)["n"] for each in rabbitmq.take(exchange)] == list(range(20))


def test_a_message_larger_than_a_frame_arrives_whole(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, frame_max=8192)
    site.start()
    ids = [site.send("shop", {"text": "x" * size}) for size in (1, 8172, 8173, 8174, 50_000, 600_000)]

    for id in ids:
        site.wait_for_status(id, "completed")

    arrived = sorted(len(json.loads(each.body)["text"]) for each in rabbitmq.take(exchange))
    assert arrived == [1, 8172, 8173, 8174, 50_000, 600_000]


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_a_cloudevent_follows_the_binding(site: Site, rabbitmq: RabbitMQ, exchange: str, mode: str) -> None:
    options = {"cloudevents": True, "cloudevents_mode": mode, "cloudevents_type": "paid", "cloudevents_source": "/shop"}
    endpoint(site, rabbitmq, exchange, **options)
    site.start()

    message = site.wait_for_status(site.send("shop", {"order": 7}), "completed")

    (found,) = rabbitmq.take(exchange)
    if mode == "binary":
        headers = found.properties.headers
        assert (headers["cloudEvents:specversion"], headers["cloudEvents:type"]) == ("1.0", "paid")
        assert (headers["cloudEvents:id"], headers["cloudEvents:source"]) == (str(message["message_id"]), "/shop")
        assert json.loads(found.body) == {"order": 7}
        assert found.properties.content_type == "application/json"
    else:
        event = json.loads(found.body)
        assert (event["id"], event["data"]) == (str(message["message_id"]), {"order": 7})
        assert found.properties.content_type == "application/cloudevents+json"


def test_without_an_exchange_the_routing_key_is_the_queue(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, exchange=None, routing_key=exchange, persistent=False)
    site.start()

    site.wait_for_status(site.send(), "completed")

    (found,) = rabbitmq.take(exchange)
    assert found.properties.delivery_mode == 1


# What fails, and how.


def test_a_message_that_no_queue_takes_has_failed(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    with rabbitmq.channel() as channel:
        channel.queue_unbind(exchange, exchange, "#")
        channel.queue_bind(exchange, exchange, "order.paid")
    endpoint(site, rabbitmq, exchange, ONCE, routing_key="{event_type}")
    site.start()

    lost = site.send(metadata={"event_type": "order.created"})
    kept = site.send(metadata={"event_type": "order.paid"})

    site.wait_for_status(kept, "completed")
    error = site.wait_for_status(lost, "failed")["last_error"]
    assert error.startswith(
        f"[RETRYABLE] unroutable: exchange '{exchange}' has no queue for routing key 'order.created'"
    )
    assert f"127.0.0.1:{rabbitmq.port}" in error
    assert len(rabbitmq.take(exchange)) == 1


def test_a_config_may_accept_unroutable_messages(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    with rabbitmq.channel() as channel:
        channel.queue_unbind(exchange, exchange, "#")
    endpoint(site, rabbitmq, exchange, mandatory=False)
    site.start()

    site.wait_for_status(site.send(), "completed")


def test_a_queue_that_is_full_refuses(site: Site, rabbitmq: RabbitMQ) -> None:
    name = f"full-{next(_numbers)}"
    rabbitmq.declare(name, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    endpoint(site, rabbitmq, name, LATER)
    site.start()
    first = site.send()
    site.wait_for_status(first, "completed")

    id = site.send()

    assert error_of(site, id).startswith(f"[RETRYABLE] refused: 127.0.0.1:{rabbitmq.port} didn't take the message")
    assert rabbitmq.depth(name) == 1
    rabbitmq.delete(name)


def test_a_missing_exchange_is_named_and_others_are_used_again_once_it_is_there(
    site: Site, rabbitmq: RabbitMQ, exchange: str
) -> None:
    name = f"missing-{next(_numbers)}"
    endpoint(site, rabbitmq, name, {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 100})
    site.start()

    ids = [site.send() for _ in range(3)]

    error = error_of(site, ids[0])
    assert error.startswith("[RETRYABLE] channel: ")
    assert f"no exchange '{name}' in vhost '/'" in error
    rabbitmq.declare(name)
    for id in ids:
        site.wait_for_status(id, "completed")
    assert len(rabbitmq.take(name)) == 3
    rabbitmq.delete(name)


def test_an_exchange_with_a_type_is_declared_whenever_it_is_gone(site: Site, rabbitmq: RabbitMQ) -> None:
    name = f"declared-{next(_numbers)}"
    endpoint(site, rabbitmq, name, AT_ONCE, exchange_type="fanout", routing_key=None, mandatory=False)
    site.start()

    for attempts in (1, 2):
        assert site.wait_for_status(site.send(), "completed")["attempts"] == attempts
        # Another one would be refused.
        rabbitmq.declare(name, "fanout")
        rabbitmq.delete(name)


def test_an_exchange_of_another_type_is_reported(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, ONCE, exchange_type="direct")
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith("[RETRYABLE] channel: ")
    assert "PRECONDITION_FAILED - inequivalent arg 'type'" in error


def test_a_user_that_may_not_write_is_reported(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, ONCE, username=POWERLESS)
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith("[RETRYABLE] channel: ")
    assert "ACCESS_REFUSED" in error


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"password": "not the right one"}, "Login was refused"),
        ({"username": "nobody"}, "Login was refused"),
        ({"vhost": "elsewhere"}, "vhost elsewhere not found"),
    ],
)
def test_a_login_that_is_refused_is_reported_without_the_password(
    site: Site, rabbitmq: RabbitMQ, exchange: str, wrong: dict[str, str], told: str
) -> None:
    endpoint(site, rabbitmq, exchange, ONCE, **wrong)
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith(f"[RETRYABLE] login: 127.0.0.1:{rabbitmq.port} closed the connection: ")
    assert told in error
    assert PASSWORD not in error
    assert "not the right one" not in error


def test_a_password_may_be_a_secret_by_name(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    site.call("set_secret", "rabbit", PASSWORD)
    site.call("set_secret", "user", USER)
    endpoint(site, rabbitmq, exchange, password={"$secret": "rabbit"}, username={"$secret": "user"})
    site.start()

    site.wait_for_status(site.send(), "completed")

    assert PASSWORD not in str(site.rows("select config from ulak.endpoints"))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"headers": {"x" * 256: "y"}}, "the name of a header"),
        ({"headers": {"x": "y" * 10_000}}, "the message's headers take more than a frame of 8192 bytes"),
        ({"metadata": {}}, "the message's metadata has no tenant, which routing_key asks for"),
        ({"metadata": {"tenant": "x" * 256}}, "routing_key is longer than 255 bytes"),
    ],
)
def test_a_message_that_amqp_cannot_carry_is_permanent_and_the_others_arrive(
    site: Site, rabbitmq: RabbitMQ, exchange: str, message: dict[str, Any], told: str
) -> None:
    endpoint(site, rabbitmq, exchange, frame_max=8192, routing_key="{tenant}")
    good = [site.send(metadata={"tenant": "a"}) for _ in range(2)]
    bad = site.send(**{"metadata": {"tenant": "a"}, **message})
    good.append(site.send(metadata={"tenant": "b"}))

    site.start()
    site.wait_until_settled()

    assert [site.status(id) for id in good] == ["completed"] * 3
    assert site.status(bad) == "failed"
    assert site.message(bad)["last_error"].startswith(f"[PERMANENT] message: {told}")


def test_what_the_broker_finds_too_large_is_permanent_and_the_others_arrive(
    site: Site, rabbitmq: RabbitMQ, exchange: str
) -> None:
    site.configure(max_payload_size=2_000_000)
    endpoint(site, rabbitmq, exchange, AT_ONCE, circuit_breaker={"threshold": 1000})
    ids = [site.send("shop", {"text": "x" * size}) for size in (10, 1_000_001, 10)]

    site.start()
    site.wait_until_settled()

    assert [site.status(id) for id in ids] == ["completed", "failed", "completed"]
    error = site.message(ids[1])["last_error"]
    assert error.startswith("[PERMANENT] message: the message is larger than the 1000000 bytes that ")


# A broker in trouble.


def test_a_broker_that_is_down_is_retried_until_it_is_there(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    port = closed_port()
    endpoint(site, rabbitmq, exchange, LATER, port=port)
    site.start()

    id = site.send()

    assert error_of(site, id) == f"[RETRYABLE] connect: Connection refused (127.0.0.1:{port})"


def test_a_broker_that_was_restarted_gets_what_it_missed(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    # An open circuit would take its time.
    options = {"threshold": 1000}
    policy = {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 100}
    endpoint(site, rabbitmq, exchange, policy, circuit_breaker=options)
    site.start()
    before = site.send(payload={"n": 1})
    site.wait_for_status(before, "completed")

    rabbitmq.kill()
    missed = site.send(payload={"n": 2})
    assert error_of(site, missed).startswith("[RETRYABLE] ")
    rabbitmq.start()

    site.wait_for_status(missed, "completed")
    # What was confirmed has survived.
    assert {json.loads(each.body)["n"] for each in rabbitmq.take(exchange)} == {1, 2}


def test_a_connection_that_the_broker_closes_is_made_again(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, AT_ONCE)
    site.start()
    site.wait_for_status(site.send(), "completed")

    rabbitmq.close_connections()

    site.wait_for_status(site.send(), "completed")


def test_a_full_disk_is_named_as_the_reason_and_everything_arrives_later(
    site: Site, rabbitmq: RabbitMQ, exchange: str
) -> None:
    options = {"threshold": 1000}
    policy = {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 100}
    endpoint(site, rabbitmq, exchange, policy, circuit_breaker=options, timeout=1)
    site.start()
    with rabbitmq.disk_alarm():
        ids = [site.send() for _ in range(5)]
        error = error_of(site, ids[0])

    assert error.startswith(f"[RETRYABLE] timeout: no acknowledgement from 127.0.0.1:{rabbitmq.port} in time")
    assert error.endswith("the broker accepts no messages at the moment: low on disk")
    for id in ids:
        site.wait_for_status(id, "completed")
    wanted = {str(site.message(id)["message_id"]) for id in ids}
    assert {each.properties.message_id for each in rabbitmq.take(exchange)} == wanted


def received(rabbitmq: RabbitMQ) -> dict[str, int]:
    """By connection: how many packets have come. While nothing else is sent, each is a heartbeat."""
    listed = rabbitmq.control("list_connections", "--no-table-headers", "pid", "recv_cnt")
    return {pid: int(count) for pid, count in map(str.split, listed.splitlines())}


def test_the_connection_lives_while_nothing_is_sent(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    """Heartbeats are all that comes. When they are due: unit/test_amqp.py."""
    endpoint(site, rabbitmq, exchange, ONCE, heartbeat=6)
    site.start()
    site.wait_for_status(site.send(), "completed")
    # Those of other tests may not have ended yet.
    connections = wait_until(lambda: len(found := received(rabbitmq)) == 1 and found, "a single connection") or {}
    ((connection, before),) = connections.items()

    wait_until(lambda: received(rabbitmq)[connection] >= before + 3, "three heartbeats")

    assert site.wait_for_status(site.send(), "completed")["attempts"] == 1
    assert received(rabbitmq).keys() == {connection}


def test_a_connection_is_used_again_and_ends_with_the_run(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange)
    closing, lost = "closing AMQP connection", "client unexpectedly closed TCP connection"
    opened, closed, before = (rabbitmq.logged(text) for text in (ACCEPTED, closing, lost))
    worker = site.start()
    for _ in range(5):
        site.wait_for_status(site.send(), "completed")
    assert rabbitmq.logged(ACCEPTED, opened) == 1

    site.call("stop")
    worker.result()

    wait_until(lambda: rabbitmq.logged(closing, closed))
    assert rabbitmq.logged(lost, before) == 0


# Where it may connect to, and how.


def test_an_address_that_is_not_allowed_is_never_dialled(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    site.configure(http_allowed_networks="")
    endpoint(site, rabbitmq, exchange, host="localhost")
    before = rabbitmq.logged(ACCEPTED)
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith("[PERMANENT] blocked: address ")
    assert rabbitmq.logged(ACCEPTED, before) == 0


def test_tls_is_verified_on_both_sides_unless_the_config_says_otherwise(
    site: Site, rabbitmq: RabbitMQ, exchange: str, tmp_path: Path
) -> None:
    assert rabbitmq.certificate is not None
    authority, shown = {"tls_ca_cert": str(rabbitmq.certificate.certificate)}, shown_by_client(rabbitmq.certificate)
    stranger = {"tls_ca_cert": str(make_certificate(tmp_path).certificate)}
    configs: dict[str, dict[str, Any]] = {
        "trusted": {**authority, **shown},
        "untrusted": {**stranger, **shown},
        "careless": {"tls_verify_peer": False, **shown},
        "nameless": authority,
    }
    for name, tls in configs.items():
        given = rabbitmq.config(port=rabbitmq.tls_port, tls=True, exchange=exchange, routing_key=name, **tls)
        site.endpoint(name, given, ONCE, "amqp")
    site.start()

    site.wait_for_status(site.send("trusted"), "completed")
    site.wait_for_status(site.send("careless"), "completed")
    untrusted = site.wait_for_status(site.send("untrusted"), "failed")["last_error"]
    nameless = site.wait_for_status(site.send("nameless"), "failed")["last_error"]

    assert untrusted == f"[RETRYABLE] tls: self-signed certificate (127.0.0.1:{rabbitmq.tls_port})"
    assert nameless == f"[RETRYABLE] tls: 127.0.0.1:{rabbitmq.tls_port}: tlsv13 alert certificate required"
    assert {each.routing_key for each in rabbitmq.take(exchange)} == {"trusted", "careless"}


def test_a_file_that_cannot_be_used_is_the_configs_fault(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange, ONCE, port=rabbitmq.tls_port, tls=True, tls_ca_cert="/dev/zero")
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith("[RETRYABLE] config: a file that the config names can't be used")


def test_a_server_that_is_no_broker_is_named_in_the_error(site: Site, rabbitmq: RabbitMQ, receiver: Receiver) -> None:
    endpoint(site, rabbitmq, "x", ONCE, port=receiver.port, timeout=0.5)
    site.start()

    error = site.wait_for_status(site.send(), "failed")["last_error"]

    assert error.startswith("[RETRYABLE] ")
    assert f"127.0.0.1:{receiver.port}" in error


# What an operator sees.


def test_ping_says_whether_a_message_would_arrive(site: Site, rabbitmq: RabbitMQ, exchange: str) -> None:
    endpoint(site, rabbitmq, exchange)
    site.endpoint("wrong", rabbitmq.config(exchange="nowhere", routing_key="a"), None, "amqp")

    (good,) = site.rows("select * from ulak.ping('shop')")
    (bad,) = site.rows("select * from ulak.ping('wrong')")

    assert (good["outcome"], good["error"]) == ("delivered", None)
    assert bad["outcome"] != "delivered"
    assert "no exchange 'nowhere'" in bad["error"]
    (found,) = rabbitmq.take(exchange)
    assert json.loads(found.body) == {"type": "ulak.ping"}


def test_explain_tells_why_a_message_waits(site: Site, rabbitmq: RabbitMQ) -> None:
    endpoint(site, rabbitmq, "nowhere", LATER)
    site.start()
    id = site.send()
    error_of(site, id)

    told = "\n".join(str(row) for row in site.rows("select * from ulak.explain(%s)", id))

    assert "no exchange 'nowhere'" in told


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hosts": "x"}, "hosts"),
        ({"port": 0}, "port"),
        ({"vhost": "x" * 256}, "vhost"),
        ({"exchange": ""}, "routing_key"),
        ({"exchange_type": "what"}, "exchange_type"),
        ({"exchange": "", "routing_key": "q", "exchange_type": "topic"}, "exchange_type"),
        ({"routing_key": "a.{b"}, "routing_key"),
        ({"frame_max": 100}, "frame_max"),
        ({"heartbeat": -1}, "heartbeat"),
        ({"tls_ca_cert": "/etc/ca.pem"}, "tls_ca_cert"),
        ({"tls": True, "tls_key": "/etc/key.pem"}, "tls_cert"),
        ({"username": "only"}, "password"),
        ({"password": "only"}, "username"),
        ({"cloudevents": True, "cloudevents_type": "a\nb"}, "cloudevents_type"),
        ({"exchange": "amq.topic", "exchange_type": "topic"}, "exchange_type"),
        ({"host": "amqp://rabbit"}, "host"),
    ],
)
def test_a_config_that_means_nothing_is_refused(site: Site, config: dict[str, Any], told: str) -> None:
    given = {"host": "rabbit.example.com", "exchange": "orders"} | config
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"invalid config of amqp endpoint: .*{told}"):
        site.db.execute("select ulak.create_endpoint('shop', 'amqp', %s)", [json.dumps(given)])
