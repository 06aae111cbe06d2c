"""What a login that may send must not be able to do to others."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL
from psycopg.types.json import Jsonb
from support import brokers
from support.brokers import PROTOCOLS
from support.cluster import Cluster, Connect
from support.errors import refused
from support.messages import insert_messages
from support.mosquitto import Mosquitto
from support.node import Held
from support.receiver import Answer, Receiver
from support.sessions import wait_until
from support.site import Site

DB = psycopg.Connection[Any]
SEND = "select ulak.send('shop', '1', p_headers => %s)"
OTHER_DOTS = "must be percent-encoded UTF-8, without characters that pass for a dot or a slash"
SIGV4 = {"type": "aws_sigv4", "access_key": "a", "secret_key": "b", "region": "eu-west-1", "service": "sqs"}
# Each number is a few bytes in jsonb, and 131,072 digits as text.
VAST = '{"numbers": [' + ",".join(["1e131071"] * 9000) + "]}"
# Its text has more digits than Python reads of a number.
SEND_VAST = """select ulak.send(%s, '{"a": 1}', p_metadata => '{"n": 1e4400, "last": "x"}')"""
# It runs with the rights of its caller; what it did shows which role that was.
EVIL = """
    create table {schema}.seen (who text default current_user);
    grant insert on {schema}.seen to public;
    create function {schema}.evil(p_state uuid[], p_value uuid) returns uuid[] language plpgsql as $$
    begin
        insert into {schema}.seen default values;
        return p_state || p_value;
    end
    $$;
    create aggregate {schema}.array_agg(uuid) (sfunc = {schema}.evil, stype = uuid[]);
"""


@pytest.fixture
def application(connect: Connect) -> DB:
    return connect("ulak_application")


def endpoint(db: DB, **config: Any) -> None:
    db.execute("select ulak.create_endpoint('shop', 'http', %s)", [Jsonb({"url": "https://example.com", **config})])


def sent(db: DB) -> int:
    (count,) = db.execute("select count(*) from ulak.queue").fetchone() or (None,)
    assert isinstance(count, int)
    return count


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "name",
    [
        "ulak-event-type",
        "Ulak-Anything",
        "webhook-signature",
        "WEBHOOK-ID",
        "webhook-anything",
        "Host",
        "content-length",
        "TE",
        # To WSGI and CGI an underscore is a hyphen.
        "ulak_event_type",
        "Webhook_Id",
        "content_length",
        "ULAK_-attempt",
    ],
)
def test_it_cannot_send_a_header_that_only_ulak_sets(db: DB, application: DB, name: str) -> None:
    endpoint(db)

    denied = refused(application, SEND, Jsonb({name: "forged"}))

    assert (denied.sqlstate, denied.message_primary) == ("42939", f'header "{name}" is reserved')
    assert sent(db) == 0


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"auth": SIGV4}, "X-Amz-Target"),
        ({"auth": SIGV4}, "x-amz-security-token"),
        ({"auth": SIGV4}, "Authorization"),
        ({"auth": {"type": "bearer", "token": "t"}}, "AUTHORIZATION"),
        ({"headers": {"Authorization": "Token t"}}, "authorization"),
        ({"headers": {"X-Api-Key": {"$secret": "key"}}}, "x-api-KEY"),
        ({"proxy": {"url": "http://proxy:3128"}}, "Proxy-Authorization"),
        ({"headers": {"X-Api-Key": {"$secret": "key"}}}, "x_api_key"),
        ({"headers": {"X_Api_Key": {"$secret": "key"}}}, "x-api-key"),
        ({"signature": {"scheme": "hmac", "header": "x-shop-hmac"}, "signing_secret": "long enough"}, "x_shop-hmac"),
        ({"signature": {"scheme": "github"}, "signing_secret": "long enough"}, "X_Hub_Signature_256"),
        ({"auth": SIGV4}, "x_amz_target"),
        ({"cloudevents": True}, "ce_type"),
        ({"cloudevents": True}, "CE-Source"),
    ],
)
def test_it_cannot_replace_what_the_endpoint_authenticates_itself_with(
    db: DB, application: DB, config: dict[str, Any], name: str
) -> None:
    db.execute("select ulak.set_secret('key', 'k')")
    endpoint(db, **config)

    denied = refused(application, SEND, Jsonb({"x-shop": "fine", name: "mine"}))

    assert (denied.sqlstate, denied.message_primary) == ("42501", f'header "{name}" is set by the endpoint')
    assert sent(db) == 0


BROKERS = {
    "amqp": {"host": "broker", "username": "u", "password": "p", "exchange": "e"},
    "kafka": {"broker": "broker:9092", "topic": "t"},
    "mqtt": {"broker": "broker", "topic": "t"},
    "nats": {"url": "nats://broker", "subject": "s"},
}


@pytest.mark.parametrize(
    ("protocol", "config", "name"),
    [
        ("amqp", {}, "CC"),
        ("amqp", {}, "bcc"),
        ("amqp", {"cloudevents": True}, "cloudEvents_type"),
        ("amqp", {"cloudevents": True}, "CloudEvents-Source"),
        ("kafka", {"cloudevents": True}, "ce_type"),
        ("mqtt", {"cloudevents": True}, "type"),
        ("mqtt", {"cloudevents": True}, "id"),
        ("mqtt", {"cloudevents": True}, "source"),
        ("mqtt", {"cloudevents": True}, "Subject"),
        ("nats", {"cloudevents": True}, "ce-id"),
        ("nats", {}, "Nats-Rollup"),
        ("nats", {}, "nats_msg_id"),
        ("nats", {}, "NATS-TTL"),
    ],
)
def test_it_can_neither_command_a_broker_nor_forge_an_event_by_a_header(
    db: DB, application: DB, protocol: str, config: dict[str, Any], name: str
) -> None:
    db.execute("select ulak.create_endpoint('shop', %s, %s)", [protocol, Jsonb({**BROKERS[protocol], **config})])

    denied = refused(application, SEND, Jsonb({"x-shop": "fine", name: "forged"}))

    assert (denied.sqlstate, denied.message_primary) == ("42501", f'header "{name}" is set by the endpoint')
    assert sent(db) == 0


def test_a_header_that_forges_an_event_elsewhere_is_an_ordinary_one_where_nothing_is_made_of_it(
    db: DB, application: DB
) -> None:
    db.execute("select ulak.create_endpoint('shop', 'mqtt', %s)", [Jsonb(BROKERS["mqtt"])])

    application.execute(SEND, [Jsonb({"type": "plain", "id": "7"})])

    assert sent(db) == 1


@pytest.mark.parametrize(
    "path",
    [
        "..;/admin",
        "a/..;x=1/b",
        "%2e%2e;/admin",
        "..%3b/admin",
        "%252e%252e/admin",
        "a%252f..%252fb",
        "%25252e%25252e%2fadmin",
    ],
)
def test_it_cannot_leave_the_endpoints_path_by_what_some_receivers_decode(db: DB, application: DB, path: str) -> None:
    """Twice, or without what follows a semicolon, as servers of Java do."""
    endpoint(db)

    denied = refused(application, "select ulak.send('shop', '1', p_path => %s)", path)

    assert (denied.sqlstate, denied.message_primary) == ("22023", "the path must not have the segments . and ..")
    assert sent(db) == 0


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("%25%32%65%25%32%65/admin", "must not have letters, digits, or - . _ percent-encoded"),
        ("a/%252%65%252%65/admin", "must not have letters, digits, or - . _ percent-encoded"),
        ("%25%2532%2565/admin", "must not be percent-encoded twice"),
        ("a%2500", "must not be percent-encoded twice"),
        ("%c0%ae%c0%ae/admin", OTHER_DOTS),
        ("%C0%AF", OTHER_DOTS),
        ("%e0%80%ae./admin", OTHER_DOTS),
        ("%f0%80%80%ae./admin", OTHER_DOTS),
        ("%ef%bc%8e%ef%bc%8e/admin", OTHER_DOTS),
        ("a%ef%bc%8fadmin", OTHER_DOTS),
    ],
)
def test_it_cannot_hide_a_path_from_the_check(db: DB, application: DB, path: str, problem: str) -> None:
    endpoint(db)

    denied = refused(application, "select ulak.send('shop', '1', p_path => %s)", path)

    assert (denied.sqlstate, denied.message_primary) == ("22023", f"the path {problem}")
    assert sent(db) == 0


@pytest.mark.parametrize("path", ["100%25", "a%20b/%7Eada/%C3%A9t%C3%A9", "a?q=%41&r=..", "x%2Fy", "%E2%82%AC%25x"])
def test_it_may_encode_what_has_to_be(db: DB, application: DB, path: str) -> None:
    endpoint(db)

    application.execute("select ulak.send('shop', '1', p_path => %s)", [path])

    assert sent(db) == 1


@pytest.mark.parametrize(
    "path", ["?X-Amz-Security-Token=x", "q?a=1&x-amz-target=Evil", "?Action=PurgeQueue", "?x%2Damz-a=1"]
)
def test_it_cannot_have_an_order_to_the_service_signed_by_the_endpoints_key(db: DB, application: DB, path: str) -> None:
    endpoint(db, auth=SIGV4)

    denied = refused(application, "select ulak.send('shop', '1', p_path => %s)", path)

    assert denied.sqlstate == "42501"
    assert sent(db) == 0


EVENT_TYPES = [
    "application/cloudevents+json",
    "Application/CloudEvents; charset=utf-8",
    "application/cloudevents-batch+json",
]


@pytest.mark.parametrize("content_type", EVENT_TYPES)
@pytest.mark.parametrize(
    ("protocol", "config"),
    [
        ("http", {"url": "https://example.com"}),
        ("amqp", {"host": "rabbit", "exchange": "e"}),
        ("kafka", {"broker": "kafka:9092", "topic": "t"}),
        ("mqtt", {"broker": "mqtt", "topic": "t"}),
    ],
)
def test_it_cannot_send_a_body_that_is_an_event_of_its_own_making(
    db: DB, application: DB, protocol: str, config: dict[str, Any], content_type: str
) -> None:
    db.execute("select ulak.create_endpoint('shop', %s, %s)", [protocol, Jsonb({**config, "cloudevents": True})])
    forged = '{"specversion": "1.0", "type": "ulak.circuit.opened"}'

    by_parameter = "select ulak.send('shop', p_raw => %s, p_content_type => %s)"
    by_header = "select ulak.send('shop', p_raw => %s, p_headers => jsonb_build_object('Content-Type', %s::text))"
    many = "select ulak.send_messages('shop', jsonb_build_array(jsonb_build_object('raw', %s::text, 'content_type', %s::text)))"
    for statement in (by_parameter, by_header, many):
        denied = refused(application, statement, forged, content_type)
        assert denied.sqlstate == "42501"
    assert sent(db) == 0


@pytest.mark.parametrize("is_secret", [False, True])
@pytest.mark.parametrize(
    "path", ["?key=mine", "orders?a=1&KEY=mine", "?a=1;key=mine", "?k%65y=mine", "?key", "?a=1?&key="]
)
def test_it_cannot_replace_a_parameter_of_the_endpoints_url(
    db: DB, application: DB, path: str, is_secret: bool
) -> None:
    url = "https://example.com/hook?key=hush&v=1"
    db.execute("select ulak.set_secret('url', %s)", [url])
    endpoint(db, url={"$secret": "url"} if is_secret else url)

    denied = refused(application, "select ulak.send('shop', '1', p_path => %s)", path)

    assert denied.sqlstate == "42501"
    assert "hush" not in f"{denied.message_primary} {denied.message_detail} {denied.message_hint}"
    assert sent(db) == 0
    application.execute("select ulak.send('shop', '1', p_path => 'orders?other=k%65y&b=key')")


def test_it_may_send_headers_that_prove_nothing(db: DB, application: DB) -> None:
    endpoint(db, headers={"X-Shop": "endpoint"})

    application.execute(SEND, [Jsonb({"X-Shop": "message", "authorization": "mine", "x-amz-target": "no SigV4 here"})])

    assert sent(db) == 1


@pytest.mark.parametrize("event_type", ["ulak.message.dead", "ULAK.message.dead", "ulak."])
def test_it_cannot_forge_an_event_of_ulak(db: DB, application: DB, event_type: str) -> None:
    endpoint(db, cloudevents=True)

    denied = refused(application, "select ulak.send('shop', '1', p_metadata => %s)", Jsonb({"event_type": event_type}))

    assert (denied.sqlstate, denied.message_primary) == ("42939", f'event type "{event_type}" is reserved')
    assert refused(application, "select ulak.publish(%s, '1')", event_type).sqlstate == "42939"
    assert sent(db) == 0


def test_a_receiver_can_tell_an_event_of_ulak_by_its_header(db: DB) -> None:
    endpoint(db)
    db.execute("select ulak.create_endpoint('pull', 'pull', '{}')")
    db.execute("select ulak.subscribe('ulak.message.dead', 'shop')")
    db.execute("select ulak.archive_single_to_dlq(ulak.send('pull', '1'))")
    db.execute("select ulak.send('pull', '2')")

    db.execute("select ulak.fail(id, 'w', attempt, 'no', p_permanent => true) from ulak.claim('w', 1, 'pull')")

    query = "select headers ->> 'ulak-event-type', metadata ->> 'event_type' from ulak.queue where endpoint_id = 1"
    assert set(db.execute(query).fetchall()) == {("ulak.message.dead", "ulak.message.dead")}


@pytest.mark.parametrize(
    ("argument", "setting", "value"),
    [
        ("p_metadata", "max_metadata_size", '{{"a": "{}"}}'.format("x" * 65536)),
        # Ten bytes each, and a hundred thousand as text: it took the worker, the claim and pg_dump beyond a gigabyte.
        ("p_metadata", "max_metadata_size", '{"a": [1e100000, 1e100000]}'),
        ("p_metadata", "max_metadata_size", json.dumps({"a": [1] * 20000})),
        ("p_headers", "max_headers_size", '{{"a": "{}"}}'.format("x" * 16384)),
        ("p_headers", "max_headers_size", json.dumps({f"a{n}": "" for n in range(2000)})),
    ],
)
def test_it_cannot_send_headers_or_metadata_of_any_size(
    db: DB, application: DB, argument: str, setting: str, value: str
) -> None:
    endpoint(db)

    denied = refused(application, f"select ulak.send('shop', '1', {argument} => %s)", value)

    assert denied.sqlstate == "54000"
    assert str(denied.message_primary).endswith(f"are larger than {setting}")
    assert sent(db) == 0


@pytest.mark.parametrize(
    "statement",
    [
        "select ulak.send('shop', %s)",
        "select ulak.send('shop', '1', p_metadata => %s)",
        "select ulak.send_batch('shop', array['1', %s]::jsonb[])",
        "select ulak.publish('deep', %s)",
        "select ulak.publish_batch(jsonb_build_array(jsonb_build_object('event_type', 'deep', 'payload', %s::jsonb)))",
    ],
)
def test_it_cannot_send_what_is_nested_so_deep_that_readers_give_up(db: DB, application: DB, statement: str) -> None:
    endpoint(db)
    db.execute("select ulak.create_event_type('deep'), ulak.subscribe('deep', 'shop')")

    for levels in (300, 3000):
        denied = refused(application, statement, nested(levels))

        assert denied.sqlstate == "54000"
        assert "deeper than max_json_depth" in str(denied.message_primary)
    application.execute(statement, [nested(99)])  # type: ignore[call-overload]
    assert sent(db) > 0


def test_a_small_payload_is_delivered_however_deep_it_is(cluster: Cluster, database: str, receiver: Receiver) -> None:
    """Up to 1024 bytes the depth isn't looked at: 511 levels at most."""
    payload = "[" * 511 + "]" * 511
    site = Site(cluster, database)
    for name, config in (
        ("plain", {}),
        ("event", {"cloudevents": True}),
        ("batch", {"batch_size": 10, "batch_format": "cloudevents"}),
    ):
        site.http(name, receiver.url, **config)
        site.db.execute("select ulak.send(%s, %s)", [name, payload])

    site.start()

    site.wait_until_settled()
    assert site.value("select array_agg(distinct status) from ulak.messages") == ["completed"]
    assert all(b"[" * 511 in request.body for request in receiver.requests)
    site.close()


def test_limits_are_settings(db: DB, application: DB) -> None:
    endpoint(db)
    for name, value in (("max_headers_size", "1048576"), ("max_metadata_size", "1048576"), ("max_json_depth", "500")):
        db.execute("select ulak.configure(%s, %s)", [name, value])

    application.execute(
        "select ulak.send('shop', %s, p_headers => %s, p_metadata => %s)",
        [nested(499), Jsonb({"a": "x" * 20000}), Jsonb({"a": "x" * 100000})],
    )

    assert sent(db) == 1


def failure(site: Site, id: int) -> str:
    """The error that it failed with; not the whole row, which can't be read."""
    wait_until(lambda: site.value("select status from ulak.messages where id = %s", id) == "failed", "its failure")
    return str(site.value("select last_error from ulak.messages where id = %s", id))


def great_depth() -> tuple[int, bool]:
    """Of JSON, and whether this Python, which is the server's, can read it: 3.12 and newer read ten times as deep as those
    before, and 3.14 whatever a database can store."""
    for depth in (3000, 12000):
        try:
            json.loads("[" * depth + "]" * depth)
        except RecursionError:
            return depth, False
    return depth, True


def test_a_message_of_more_than_a_gigabyte_fails_alone(site: Site, receiver: Receiver) -> None:
    endpoint = site.http("shop", receiver.url)
    before = site.send("shop")
    # Past the checks of send().
    (vast,) = insert_messages(site.db, endpoint_id=endpoint, metadata=VAST)
    behind = site.send("shop")

    worker = site.start()

    assert failure(site, vast).startswith("[PERMANENT] message: it can't be read: ")
    for id in (before, behind, site.send("shop")):
        assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


def test_large_messages_are_delivered_whole(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    # Not to be compressed below what is read with a claim.
    texts = [
        site.value("select string_agg(md5(n::text), '') from generate_series(%s::integer, %s::integer) n", n, n + 20000)
        for n in (1, 2)
    ]
    ids = [site.send("shop", {"text": text}, metadata={"n": 1}, headers={"x-own": "1"}) for text in texts]

    site.start()

    for id in ids:
        site.wait_for_status(id, "completed")
    arrived = [(json.loads(each.body)["text"], each.headers["x-own"]) for each in receiver.wait_for(2)]
    assert sorted(arrived) == sorted((text, "1") for text in texts)


@pytest.mark.parametrize("batch_size", [1, 10])
def test_metadata_that_is_too_deep_fails_alone_also_in_a_batch(site: Site, receiver: Receiver, batch_size: int) -> None:
    batched = {"batch_size": batch_size, "batch_format": "cloudevents"} if batch_size > 1 else {"cloudevents": True}
    endpoint = site.http("shop", receiver.url, **batched)
    before = site.send("shop", metadata={"event_type": "a"})
    # For those that read deeper than PostgreSQL writes by default.
    site.db.execute("set max_stack_depth = '7MB'")
    depth, is_readable = great_depth()
    (deep,) = insert_messages(site.db, endpoint_id=endpoint, metadata=nested(depth))
    behind = site.send("shop", metadata={"event_type": "b"})

    worker = site.start()

    if is_readable:
        site.wait_for_status(deep, "completed")
    else:
        assert failure(site, deep) == "[PERMANENT] message: the message's metadata is nested too deeply to be read"
    for id in (before, behind):
        assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


@pytest.mark.parametrize(
    "config",
    [
        {"cloudevents": True},
        {"cloudevents": True, "cloudevents_mode": "structured"},
        {"cloudevents": True, "batch_size": 10},
        {"batch_size": 10, "batch_format": "cloudevents"},
    ],
)
def test_a_number_of_too_many_digits_fails_alone_whatever_the_format(
    site: Site, receiver: Receiver, config: dict[str, Any]
) -> None:
    site.http("shop", receiver.url, circuit_breaker={"threshold": 1, "counts": "all"}, **config)
    site.http("other", receiver.url)
    before = site.send("shop", metadata={"event_type": "a"})
    with site.connect("ulak_application") as application:
        vast = application.execute(SEND_VAST, ["shop"]).fetchone()
    behind = site.send("shop", metadata={"event_type": "b"})
    other = site.send("other")

    worker = site.start()

    assert vast is not None
    assert failure(site, vast[0]) == "[PERMANENT] message: it can't be built: ValueError"
    for id in (before, behind, other):
        assert site.wait_for_status(id, "completed")["attempts"] == 1
    assert site.value("select circuit_state from ulak.endpoints where name = 'shop'") == "closed"
    assert not worker.call.is_done()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_message_without_a_route_fails_alone_and_the_connection_stays(
    site: Site, protocol: str, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as resources:
        broker = brokers.broker(protocol, request.getfixturevalue, resources)
        # The value is the rest of the place's name.
        place = str(broker.config[broker.route])
        route = {broker.route: place[:-1] + "{last}"}
        site.endpoint("shop", {**broker.config, **route, "circuit_breaker": {"threshold": 1}}, protocol=protocol)
        ids = [site.send("shop", {"n": n}, metadata={"last": place[-1]}) for n in range(8)]
        with site.connect("ulak_application") as application:
            vast = application.execute(SEND_VAST, ["shop"]).fetchone()

        worker = site.start()

        assert vast is not None
        assert failure(site, vast[0]) == "[PERMANENT] message: it can't be built: ValueError"
        for id in ids:
            assert site.wait_for_status(id, "completed")["attempts"] == 1
        assert not worker.call.is_done()


@pytest.fixture
def unencoded(site_in: Callable[[str], Site]) -> Site:
    return site_in("SQL_ASCII")


def insert_broken(site: Site, endpoint: int, column: str) -> int:
    value = SQL("convert_from('\\xff', 'SQL_ASCII')")
    broken = value if column == "ordering_key" else SQL("jsonb_build_object('x', {})").format(value)
    (id,) = insert_messages(site.db, endpoint_id=endpoint, **{column: broken})
    return id


@pytest.mark.parametrize("column", ["payload", "headers", "metadata", "ordering_key"])
def test_bytes_that_are_no_utf8_fail_alone_in_a_database_without_an_encoding(
    unencoded: Site, receiver: Receiver, column: str
) -> None:
    endpoint = unencoded.http("shop", receiver.url)
    before = unencoded.send("shop")
    broken = insert_broken(unencoded, endpoint, column)
    behind = unencoded.send("shop", {"text": "fine"})

    worker = unencoded.start()

    assert failure(unencoded, broken).startswith("[PERMANENT] message: it can't be read: ")
    for id in (before, behind):
        assert unencoded.wait_for_status(id, "completed")["attempts"] == 1
    assert not worker.call.is_done()


def test_bytes_that_are_no_utf8_fail_alone_in_light_traffic(unencoded: Site, receiver: Receiver) -> None:
    endpoint = unencoded.http("shop", receiver.url)
    worker = unencoded.start()
    unencoded.wait_for_status(unencoded.send("shop"), "completed")

    broken = insert_broken(unencoded, endpoint, "payload")
    neighbour = unencoded.send("shop")

    unencoded.wait_for_status(neighbour, "completed")
    assert failure(unencoded, broken).startswith("[PERMANENT] message: it can't be read: ")
    assert not worker.call.is_done()


@pytest.mark.parametrize("schema", ["public", "postgres"])
def test_an_aggregate_of_its_own_is_not_called_by_a_worker(
    cluster: Cluster, own_site: Site, receiver: Receiver, schema: str
) -> None:
    """In public, or in a schema with the name of the role that runs the worker."""
    own_site.db.execute("grant create on schema public to ulak_application")
    own_site.db.execute(f"grant create on database {own_site.database} to ulak_application")
    own_site.http("shop", receiver.url)
    own_site.send_many(3)
    with own_site.connect("ulak_application") as application:
        if schema != "public":
            application.execute(f"create schema {schema}")
            application.execute(f"grant usage on schema {schema} to public")
        application.execute(EVIL.format(schema=schema))  # type: ignore[arg-type]

    own_site.start(role=cluster.user)
    receiver.wait_for(3)
    own_site.wait_until_settled()
    with own_site.connect() as session:
        session.execute("call ulak.run_maintenance()")

    assert own_site.rows(f"select who from {schema}.seen") == []


def test_its_metadata_leads_to_no_other_part_of_a_broker(site: Site, mosquitto: Mosquitto) -> None:
    broker = {"broker": "127.0.0.1", "port": mosquitto.port, "topic": "tenants/{tenant}/events"}
    site.endpoint("shop", broker, None, "mqtt")
    site.endpoint("open", {**broker, "allow_separators": True}, None, "mqtt")
    site.start()

    strayed = site.send("shop", metadata={"tenant": "acme/admin"})
    allowed = site.send("open", metadata={"tenant": "acme/admin"})

    site.wait_for_status(strayed, "failed")
    site.wait_for_status(allowed, "completed")
    assert site.dead(strayed)["last_error"].startswith("[PERMANENT]")
    assert 'has "/" in tenant, which parts topic' in site.dead(strayed)["last_error"]


@pytest.mark.parametrize("content_type", ["application/cloudevents+json", "Application/CloudEvents-batch+json"])
def test_a_forged_event_that_waits_already_is_not_delivered(site: Site, receiver: Receiver, content_type: str) -> None:
    """Sent before its endpoint made CloudEvents, or before that was refused."""
    site.http("shop", receiver.url, {"max_retries": 0})
    forged = site.value(
        "select ulak.send('shop', p_raw => '{\"specversion\": \"1.0\"}', p_content_type => %s)", content_type
    )
    joined = site.send("shop", headers={"ce_type": "forged", "x_other": "1"})
    site.call("alter_endpoint", "shop", {"url": receiver.url, "cloudevents": True})
    site.start()

    site.wait_for_status(forged, "failed")
    site.wait_for_status(joined, "completed")

    (request,) = receiver.requests
    assert request.headers["ce-type"] == "ulak.message"
    assert "ce_type" not in request.headers
    assert request.headers["x_other"] == "1"


# The circuit of a receiver that is well.

IMPATIENT = """
    select ulak.send('slow', '{}', p_timeout => 0.1, p_priority => 10) from generate_series(1, 120)
"""


def test_its_own_time_outs_open_no_circuit(site: Site) -> None:
    with Held() as held:
        site.http("slow", held.receiver.url, {"max_retries": 0}, circuit_breaker={"threshold": 3, "counts": "all"})
        site.db.execute(IMPATIENT)
        site.start()
        site.wait_until_settled()
        held.release()

        patient = site.send("slow")
        site.wait_for_status(patient, "completed")

    assert site.events("circuit.%") == []
    errors = site.column("select distinct left(last_error, 51) from ulak.dlq")
    assert errors == ["[RETRYABLE] message: its own time-out ended the req"]


def test_a_time_out_of_the_endpoint_counts_whatever_the_message_asked_for(site: Site) -> None:
    with Held() as held:
        site.http("slow", held.receiver.url, {"max_retries": 0}, circuit_breaker={"threshold": 3}, timeout=0.1)
        site.db.execute("select ulak.send('slow', '{}', p_timeout => 0.2) from generate_series(1, 3)")
        site.start()
        site.wait_until_settled()

    assert site.events("circuit.%") == ["circuit.opened"]


def test_its_impatient_messages_close_a_circuit_by_the_endpoints_own_time_out(site: Site) -> None:
    """They alone wait: one of them is the probe."""
    with Receiver(Answer(delay=0.3)) as receiver:
        site.http("slow", receiver.url, circuit_breaker={"threshold": 1})
        site.db.execute("select ulak.send('slow', '{}', p_timeout => 0.1)")
        site.db.execute(
            "update ulak.endpoints set circuit_state = 'open', circuit_opened_at = now(), circuit_half_open_at = now()"
        )
        site.start()
        wait_until(lambda: site.state("slow") == "closed", message="a closed circuit")

    assert site.events("circuit.%") == ["circuit.half_open", "circuit.closed"]


# Hints.


def told(db: DB, query: str) -> str:
    error = refused(db, query)
    return f"{error.message_detail} {error.message_hint}"


def test_errors_name_only_what_the_caller_may_read(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_event_type('order.created', null, '{\"type\": \"object\"}')")
    mistakes = ["select ulak.publish('order.craeted', '1')", "select ulak.publish('order.created', '1')"]

    for mistake in mistakes:
        assert "ulak.event_types" in told(db, mistake)
        assert "ulak.event_types" not in told(connect("ulak_application"), mistake)
    assert "order.created" in told(connect("ulak_application"), mistakes[0])
    assert "ulak.endpoint_list" in told(connect("ulak_application"), "select ulak.send('nowhere', '1')")
    assert "ulak.endpoint_list" not in told(connect("ulak_consumer"), "select ulak.claim('w', 1, 'nowhere')")
