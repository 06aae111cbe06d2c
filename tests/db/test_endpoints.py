"""Endpoints: what a config may hold, and when an endpoint can be created, altered and dropped."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused
from support.queue import Queue
from support.sessions import gather
from ulak.transports.http import header

DB = psycopg.Connection[Any]

URL = "https://example.com/hook"
CREATE = "select ulak.create_endpoint(%s, %s, %s)"


@pytest.fixture(scope="module")
def shared(module_session: DB) -> DB:
    """For tests that only validate."""
    module_session.execute("select ulak.set_secret('token', 'a-secret-token')")
    return module_session


def validate(db: DB, config: Any, protocol: str = "http") -> Any:
    return db.execute("select ulak.validate_endpoint_config(%s, %s)", [protocol, json.dumps(config)]).fetchone()


def problem(db: DB, config: Any, protocol: str = "http") -> str:
    error = refused(db, "select ulak.validate_endpoint_config(%s, %s)", protocol, json.dumps(config))
    assert error.sqlstate == "22023"
    prefix = f"invalid config of {protocol} endpoint: "
    assert error.message_primary is not None
    assert error.message_primary.startswith(prefix)
    return error.message_primary.removeprefix(prefix)


# Every key at once, as users of the C extension write them, and ours.
WHOLE: dict[str, Any] = {
    "url": "https://api.example.com:8443/hooks?tenant=1",
    "method": "PATCH",
    "headers": {"X-Source": "ulak", "Content-Type": "application/json", "X-Empty": ""},
    "timeout": 300,
    "connect_timeout": 1,
    "signing_secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "cloudevents": True,
    "cloudevents_mode": "binary",
    "cloudevents_type": "com.example.order",
    "rate_limit": {"limit": 100, "interval": "minute", "burst": 10},
    "auth": {"type": "bearer", "token": "t"},
    "tls_client_cert": "/etc/ssl/client.pem",
    "tls_client_key": "/etc/ssl/client.key",
    "tls_ca_bundle": "/etc/ssl/ca.pem",
    "tls_pinned_public_key": "sha256//YhKJG3Wk3ZSlFz3Oqb2HBKZG89bBIxSjDBG/A+2xNFQ=",
    "proxy": {
        "url": "http://proxy.example.com:8080",
        "type": "http",
        "username": "u",
        "password": "p",
        "no_proxy": "localhost",
        "ca_bundle": "/etc/ssl/proxy.pem",
        "ssl_verify": False,
    },
    "auto_disable_on_gone": True,
    "ssl_verify": True,
    "batch_size": 100,
    "batch_format": "json",
    "max_in_flight": 8,
    "circuit_breaker": {
        "cooldown": 5,
        "counts": "all",
        "mode": "rate",
        "window": 60,
        "min_requests": 20,
        "failure_rate": 0.5,
    },
    "retry_on": [404, "5xx"],
    "permanent_on": [501, "3xx"],
}


def test_a_config_with_every_key_is_accepted(shared: DB) -> None:
    assert validate(shared, WHOLE) == (True,)


@pytest.mark.parametrize(
    "auth",
    [
        {"type": "basic", "username": "u", "password": ""},
        {"type": "bearer", "token": "t"},
        {
            "type": "oauth2",
            "token_url": "https://id.example.com/t",
            "client_id": "c",
            "client_secret": "s",
            "scope": "a b",
            "audience": "https://api.example.com",
            "credentials": "body",
        },
        {"type": "aws_sigv4", "access_key": "A", "secret_key": "s", "region": "eu-west-1", "service": "execute-api"},
    ],
    ids=lambda auth: auth["type"],
)
def test_each_kind_of_auth_has_its_keys(shared: DB, auth: dict[str, str]) -> None:
    assert validate(shared, {"url": URL, "auth": auth}) == (True,)

    for key in set(auth) - {"type", "scope", "audience", "credentials"}:
        without = {name: value for name, value in auth.items() if name != key}
        assert problem(shared, {"url": URL, "auth": without}) == f"$.auth.{key} is required"
    assert problem(shared, {"url": URL, "auth": {**auth, "user": "x"}}) == "$.auth.user is not a known key"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "GET"}, "$.method must be one of POST, PUT, PATCH, DELETE"),
    ({"method": "get"}, "$.method must be one of POST, PUT, PATCH, DELETE"),
    ({"method": 1}, "$.method must be one of POST, PUT, PATCH, DELETE"),
    ({"timeout": 0}, "$.timeout must be at least 0.1"),
    ({"timeout": 301}, "$.timeout must be at most 300"),
    ({"timeout": "10"}, "$.timeout must be of type number"),
    ({"timeout": None}, "$.timeout must be of type number"),
    ({"connect_timeout": 61}, "$.connect_timeout must be at most 60"),
    ({"headers": ["X: y"]}, "$.headers must be of type object"),
    ({"headers": {"X-A": 1}}, "$.headers.X-A must be of type string"),
    ({"headers": {"X A": "b"}}, '$.headers["X A"] is not a valid header name'),
    ({"headers": {"X-A:": "b"}}, '$.headers["X-A:"] is not a valid header name'),
    ({"headers": {"": "b"}}, '$.headers[""] is not a valid header name'),
    ({"headers": {"X\r\nY": "b"}}, '$.headers["X\\r\\nY"] is not a valid header name'),
    ({"headers": {"X-A": "b\r\nHost: c"}}, "$.headers.X-A must not have line breaks or other control characters"),
    ({"headers": {"X-A": "b\x7f"}}, "$.headers.X-A must not have line breaks or other control characters"),
    ({"headers": {"X-A": "1", "x-a": "2"}}, "$.headers.x-a is given twice"),
    (
        {"headers": {"Authorization": "x"}, "auth": {"type": "bearer", "token": "t"}},
        '$.headers.Authorization is set by "auth" already',
    ),
    ({"signature": {}}, "$.signature.scheme is required"),
    ({"signature": {"scheme": "stripe"}}, "$.signature.scheme must be one of standard, ed25519, github, hmac"),
    ({"signature": {"scheme": "hmac"}}, '$.signature.header is required with "scheme": "hmac"'),
    ({"signature": {"scheme": "github", "prefix": "x"}}, '$.signature.prefix has no effect without "scheme": "hmac"'),
    ({"signature": {"scheme": "hmac", "header": "a b"}}, "$.signature.header is not a valid header name"),
    ({"signature": {"scheme": "hmac", "header": "Webhook-Id"}}, "$.signature.header is a header that ulak sets itself"),
    ({"signature": {"scheme": "hmac", "header": "x", "prefix": "\n"}}, "$.signature.prefix must be printable ASCII"),
    (
        {"signature": {"scheme": "hmac", "header": "x-a"}, "headers": {"X-A": "b"}},
        '$.headers.X-A is set by "signature" already',
    ),
    ({"cloudevents_source": "a\nb"}, "$.cloudevents_source must not have control characters"),
    ({"cloudevents_subject": ""}, "$.cloudevents_subject must have at least 1 characters"),
    ({"auth": {"type": "digest"}}, "$.auth.type must be one of basic, bearer, oauth2, aws_sigv4"),
    ({"auth": {"token": "t"}}, "$.auth.type is required"),
    (
        {"auth": {"type": "bearer", "token": "a\nb"}},
        "$.auth.token must not have line breaks or other control characters",
    ),
    ({"auth": {"type": "basic", "username": "a:b", "password": "c"}}, "$.auth.username must not have a colon"),
    (
        {"auth": {"type": "oauth2", "token_url": "ftp://x", "client_id": "c", "client_secret": "s"}},
        "$.auth.token_url must start with http:// or https://",
    ),
    ({"signing_secret": "short"}, "$.signing_secret must have at least 8 characters and no control characters"),
    (
        {"signing_secret": "whsec_not base64 at all, is it?"},
        "$.signing_secret must be whsec_ and at least 16 bytes in base64",
    ),
    ({"signing_secret": "whsec_c2hvcnQ="}, "$.signing_secret must be whsec_ and at least 16 bytes in base64"),
    ({"rate_limit": 100}, "$.rate_limit must be of type object"),
    ({"rate_limit": {"interval": "second"}}, "$.rate_limit.limit is required"),
    ({"rate_limit": {"limit": 0}}, "$.rate_limit.limit must be at least 1"),
    ({"rate_limit": {"limit": 1, "interval": "day"}}, "$.rate_limit.interval must be one of second, minute, hour"),
    ({"rate_limit": {"limit": 1, "burts": 1}}, "$.rate_limit.burts is not a known key"),
    ({"circuit_breaker": {"threshold": 0}}, "$.circuit_breaker.threshold must be at least 1"),
    ({"circuit_breaker": {"cooldown": 4}}, "$.circuit_breaker.cooldown must be at least 5"),
    ({"circuit_breaker": {"counts": "none"}}, "$.circuit_breaker.counts must be one of retryable, all"),
    ({"circuit_breaker": {"mode": "rate", "failure_rate": 0}}, "$.circuit_breaker.failure_rate must be greater than 0"),
    ({"circuit_breaker": {"mode": "rate", "failure_rate": 1.1}}, "$.circuit_breaker.failure_rate must be at most 1"),
    ({"circuit_breaker": {"window": 60}}, '$.circuit_breaker.window has no effect without "mode": "rate"'),
    (
        {"circuit_breaker": {"mode": "rate", "threshold": 5}},
        '$.circuit_breaker.threshold has no effect with "mode": "rate"',
    ),
    ({"retry_on": [99]}, "$.retry_on[0] must be at least 100"),
    ({"retry_on": [600]}, "$.retry_on[0] must be at most 599"),
    ({"retry_on": ["2xx"]}, "$.retry_on[0] must match the pattern ^[345]xx$"),
    ({"retry_on": [404], "permanent_on": [404]}, "$.permanent_on has a status that retry_on has too"),
    ({"proxy": {"username": "u"}}, "$.proxy.url is required"),
    ({"proxy": {"url": "http://p", "username": "u"}}, "$.proxy must have both username and password, or neither"),
    ({"proxy": {"url": "http://u:p@p"}}, "$.proxy.url must not have a user or a password"),
    ({"proxy": {"url": "http://p", "type": "https"}}, "$.proxy.type must be the scheme of the proxy's url"),
    ({"tls_client_key": "/k"}, "$.tls_client_cert is required beside tls_client_key"),
    ({"cloudevents": "true"}, "$.cloudevents must be of type boolean"),
    ({"cloudevents_mode": "batch"}, "$.cloudevents_mode must be one of structured, binary"),
    ({"batch_size": 0}, "$.batch_size must be at least 1"),
    ({"max_in_flight": 0}, "$.max_in_flight must be at least 1"),
    ({"max_in_flight": 1.5}, "$.max_in_flight must be of type integer"),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED, ids=[json.dumps(keys) for keys, _ in REFUSED])
def test_a_wrong_value_is_refused_by_its_path(shared: DB, keys: dict[str, Any], expected: str) -> None:
    assert problem(shared, {"url": URL, **keys}) == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "HTTPS://EXAMPLE.COM/",
        "https://example.com:65535/a?b=c&d=%20",
        "http://127.0.0.1:8080/x",
        "http://[::1]:8080/x",
        "http://under_score.example.com?x=@y",
    ],
)
def test_a_url_is_accepted(shared: DB, url: str) -> None:
    assert validate(shared, {"url": url}) == (True,)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "ftp://example.com",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http:/example.com",
        "http://",
        "http:///path",
        "http://?x",
        "http://:80/",
        "http://user@example.com/",
        "http://user:password@example.com/",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:/",
        "http://example.com:80a/",
        "http://example.com/#fragment",
        "http://example.com\\@evil.example/",
        "http://exa mple.com/",
        "http://example.com/a b",
        "http://example.com/\r\nX: y",
        "http://example.com/\t",
        "http://exämple.com/",
        "http://example.com/ü",
        "http://[::1/",
        "http://exa%6dple.com/",
        " http://example.com",
        "http://example.com/" + "x" * 9000,
    ],
)
def test_a_url_is_refused(shared: DB, url: str) -> None:
    assert problem(shared, {"url": url}).startswith("$.url must ")


def test_a_refused_url_is_not_repeated(shared: DB) -> None:
    error = refused(
        shared, "select ulak.validate_endpoint_config('http', %s)", '{"url": "http://me:hunter2@example.com"}'
    )

    assert "hunter2" not in f"{error.message_primary} {error.message_detail} {error.message_hint}"


def test_headers_that_ulak_sets_are_refused_and_python_agrees(shared: DB) -> None:
    row = shared.execute("select ulak_private.reserved_headers()").fetchone()

    assert row is not None
    assert set(row[0]) == header.RESERVED
    for name in row[0]:
        assert problem(shared, {"url": URL, "headers": {name.title(): "x"}}).endswith(
            "is a header that ulak sets itself"
        )


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"ulr": URL}, "url"),
        ({"url": URL, "header": {}}, "headers"),
        ({"url": URL, "Timeout": 1}, "timeout"),
        ({"url": URL, "secret": "x"}, "signing_secret"),
        ({"url": URL, "rate_limit": {"limits": 1}}, "limit"),
        ({"url": URL, "circuit_breaker": {"treshold": 1}}, "threshold"),
        ({"url": URL, "proxy": {"url": URL, "user_name": "u"}}, "username"),
        ({"url": URL, "auth": {"type": "bearer", "tokn": "t"}}, "token"),
    ],
    ids=str,
)
def test_an_unknown_key_is_answered_with_the_nearest(shared: DB, config: dict[str, Any], hint: str) -> None:
    error = refused(shared, "select ulak.validate_endpoint_config('http', %s)", json.dumps(config))

    assert error.message_hint == f'Did you mean "{hint}"?'


def test_a_pull_endpoint_takes_no_url(shared: DB) -> None:
    assert validate(
        shared, {"max_in_flight": 5, "rate_limit": {"limit": 1}, "circuit_breaker": {"threshold": 3}}, "pull"
    )
    assert validate(shared, {}, "pull") == (True,)

    for key, value in {"url": URL, "timeout": 5, "retry_on": [500], "headers": {}}.items():
        assert problem(shared, {key: value}, "pull") == f"$.{key} is not a known key"


def test_an_unknown_protocol_is_answered_with_the_nearest(shared: DB) -> None:
    for protocol in ("https", "HTTP", None):
        error = refused(shared, "select ulak.validate_endpoint_config(%s, %s)", protocol, json.dumps({"url": URL}))

        assert error.sqlstate == "22023"
        assert error.message_hint is not None
        assert "http" in error.message_hint


@pytest.mark.parametrize("config", ["null", "[]", '"x"', "1", None])
def test_a_config_must_be_an_object(shared: DB, config: str | None) -> None:
    assert refused(shared, "select ulak.validate_endpoint_config('http', %s)", config).sqlstate == "22023"


def policy_problem(db: DB, policy: Any) -> str:
    error = refused(db, "select ulak.create_endpoint('p', 'pull', '{}', %s)", json.dumps(policy))
    assert error.sqlstate == "22023"
    return str(error.message_primary)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"max_retries": 1001}, "$.max_retries must be at most 1000"),
        ({"max_retry": 5}, "$.max_retry is not a known key"),
        ({"backoff": "cubic"}, "$.backoff must be one of exponential, linear, fixed, quadratic, schedule"),
        ({"base_delay_seconds": 0}, "$.base_delay_seconds must be at least 1"),
        ({"max_delay_seconds": 86401}, "$.max_delay_seconds must be at most 86400"),
        ({"increment_seconds": 1.5}, "$.increment_seconds must be of type integer"),
        ({"base_delay_seconds": 60, "max_delay_seconds": 30}, "$.base_delay_seconds must not exceed max_delay_seconds"),
        ({"backoff": "schedule"}, '$.schedule is required with "backoff": "schedule"'),
        ({"schedule": [1]}, '$.schedule has no effect without "backoff": "schedule"'),
        ({"backoff": "schedule", "schedule": []}, "$.schedule must have at least 1 items"),
        ({"backoff": "schedule", "schedule": [1, -1]}, "$.schedule[1] must be at least 0"),
        ({"jitter": "some"}, "$.jitter must be one of none, full, equal"),
        ([], "$ must be of type object"),
        (None, "$ must be of type object"),
    ],
)
def test_a_wrong_retry_policy_is_refused_by_its_path(shared: DB, policy: Any, expected: str) -> None:
    assert policy_problem(shared, policy) == f"invalid retry policy: {expected}"


def test_a_retry_policy_with_every_key_is_accepted(db: DB) -> None:
    policy = {
        "max_retries": 20,
        "backoff": "linear",
        "base_delay_seconds": 5,
        "max_delay_seconds": 600,
        "increment_seconds": 15,
        "jitter": "equal",
    }
    db.execute("select ulak.create_endpoint('a', 'http', %s, %s)", [json.dumps({"url": URL}), json.dumps(policy)])
    db.execute(
        "select ulak.create_endpoint('b', 'pull', '{}', %s)", ['{"backoff": "schedule", "schedule": [0, 5, 86400]}']
    )


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb", "a\x7fb", "x" * 201, None])
def test_a_name_must_be_printable_and_short(shared: DB, name: str | None) -> None:
    error = refused(shared, CREATE, name, "pull", "{}")

    assert (error.sqlstate, error.message_primary) == ("22023", "invalid endpoint name")


def test_an_endpoint_is_created_with_its_defaults(db: DB) -> None:
    row = db.execute(CREATE, ["my webhook/ü", "http", json.dumps({"url": URL, "max_in_flight": 4})]).fetchone()

    assert row == (1,)
    assert db.execute(
        """
        select name, protocol, config, retry_policy, enabled, circuit_state, config_version, max_in_flight
        from ulak.endpoints
        """
    ).fetchall() == [("my webhook/ü", "http", {"url": URL, "max_in_flight": 4}, None, True, "closed", 1, 4)]


def test_a_second_endpoint_of_the_same_name_is_refused(db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])

    error = refused(db, CREATE, "a", "http", json.dumps({"url": URL}))

    assert error.sqlstate == "23505"
    assert error.message_detail == "It is endpoint 1, protocol pull."


def test_racing_sessions_create_one_endpoint(connect: Connect, db: DB) -> None:
    def create(session: DB) -> str | None:
        try:
            session.execute(CREATE, ["a", "pull", "{}"])
        except psycopg.errors.UniqueViolation as error:
            return error.diag.sqlstate
        return None

    results = gather([partial(create, connect()) for _ in range(8)])

    assert sorted(results, key=str) == ["23505"] * 7 + [None]
    assert db.execute("select count(*) from ulak.endpoints").fetchone() == (1,)


def test_altering_replaces_the_config_and_raises_its_version(db: DB) -> None:
    db.execute(
        "select ulak.create_endpoint('a', 'http', %s, '{\"max_retries\": 3}', 'first')", [json.dumps({"url": URL})]
    )

    assert db.execute("select ulak.alter_endpoint('a', %s)", ['{"url": "http://b.example"}']).fetchone() == (True,)

    query = "select config, retry_policy, description, config_version, updated_at > created_at from ulak.endpoints"
    assert db.execute(query).fetchone() == ({"url": "http://b.example"}, {"max_retries": 3}, "first", 2, True)

    db.execute("select ulak.alter_endpoint('a', p_retry_policy => '{}', p_description => 'second')")
    assert db.execute(query).fetchone() == ({"url": "http://b.example"}, {}, "second", 3, True)

    db.execute("select ulak.alter_endpoint('a', p_description => 'third')")
    assert db.execute(query).fetchone() == ({"url": "http://b.example"}, {}, "third", 3, True)


def test_a_refused_alter_changes_nothing(db: DB) -> None:
    db.execute(CREATE, ["a", "http", json.dumps({"url": URL})])

    assert refused(db, "select ulak.alter_endpoint('a', '{\"url\": \"nowhere\"}')").sqlstate == "22023"

    assert db.execute("select config, config_version from ulak.endpoints").fetchone() == ({"url": URL}, 1)


def test_a_plain_update_by_an_administrator_is_validated_too(connect: Connect) -> None:
    admin = connect("ulak_admin")
    admin.execute(CREATE, ["my-api", "http", json.dumps({"url": URL})])

    admin.execute("update ulak.endpoints set retry_policy = '{\"max_retries\": 20}' where name = 'my-api'")
    error = refused(admin, "update ulak.endpoints set retry_policy = '{\"max_retry\": 20}' where name = 'my-api'")

    assert error.message_primary == "invalid retry policy: $.max_retry is not a known key"
    assert refused(admin, "update ulak.endpoints set config = '{}'").sqlstate == "22023"
    assert admin.execute("select retry_policy, config_version from ulak.endpoints").fetchone() == (
        {"max_retries": 20},
        2,
    )


def test_the_config_version_never_falls(db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])
    db.execute("update ulak.endpoints set config_version = 9")
    db.execute("update ulak.endpoints set config_version = 1")
    db.execute("update ulak.endpoints set config_version = 1, config = '{\"max_in_flight\": 1}'")

    assert db.execute("select config_version from ulak.endpoints").fetchone() == (10,)


def test_an_unknown_endpoint_is_answered_with_the_nearest(db: DB) -> None:
    db.execute(CREATE, ["billing", "pull", "{}"])

    for statement in (
        "select ulak.alter_endpoint('biling', '{}')",
        "select ulak.drop_endpoint('biling')",
        "select ulak.rotate_secret('biling')",
        "select ulak.send('biling', '{}')",
    ):
        error = refused(db, statement)

        assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "billing"?')


def test_changes_are_logged_by_key_and_never_by_value(db: DB) -> None:
    config = {"url": URL, "signing_secret": "hunter2hunter2"}
    db.execute("select ulak.create_endpoint('a', 'http', %s)", [json.dumps(config)])
    db.execute("select ulak.alter_endpoint('a', %s)", [json.dumps({**config, "url": "http://b.example", "timeout": 5})])
    db.execute("select ulak.drop_endpoint('a')")

    log = db.execute("select event, endpoint_name, detail from ulak.event_log order by id").fetchall()

    assert log == [
        ("endpoint.created", "a", {"protocol": "http"}),
        ("endpoint.altered", "a", {"config": ["timeout", "url"], "retry_policy": [], "config_version": 2}),
        ("endpoint.dropped", "a", {"subscriptions": 0}),
    ]


def test_a_drop_is_refused_while_messages_wait_or_are_in_flight(db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])
    db.execute("select ulak.send('a', jsonb_build_object('n', n)) from generate_series(1, 3) n")
    db.execute("select count(*) from ulak.claim('w', 1, 'a')")

    error = refused(db, "select ulak.drop_endpoint('a')")

    assert error.sqlstate == "55006"
    assert error.message_detail == "Waiting messages: 2; in flight: 1; unresolved dead letters: 0."
    assert error.message_hint is not None
    shown = error.message_hint.partition(": ")[2]
    assert [row[0] for row in db.execute(shown.encode()).fetchall()] == [2]


def test_a_drop_is_refused_while_dead_letters_are_unresolved(db: DB) -> None:
    db.execute("select ulak.create_endpoint('a', 'pull', '{}', '{\"max_retries\": 0}')")
    db.execute("select ulak.send('a', '{}')")
    db.execute("select ulak.fail(c.id, 'w', c.attempt, 'no') from ulak.claim('w', 1, 'a') c")

    error = refused(db, "select ulak.drop_endpoint('a')")

    assert error.sqlstate == "55006"
    assert error.message_detail == "Waiting messages: 0; in flight: 0; unresolved dead letters: 1."
    assert error.message_hint is not None
    db.execute(error.message_hint.split("give them up: ")[1].encode())
    assert db.execute("select ulak.drop_endpoint('a')").fetchone() == (True,)


def test_a_drop_counts_by_index_and_not_over_messages_of_others(db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])
    db.execute("insert into ulak_private.deliveries (endpoint_id, event_id) select 2, 0 from generate_series(1, 5000)")

    with db.transaction():
        db.execute("select ulak.drop_endpoint('a')")
        query = "select pg_stat_get_xact_tuples_returned('ulak_private.deliveries'::regclass)"
        assert db.execute(query).fetchone() == (0,)


def test_a_drop_is_refused_while_an_open_transaction_has_sent(connect: Connect, db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])
    db.execute("select ulak.create_event_type('e')")
    db.execute("select ulak.subscribe('e', 'a')")

    for statement in (
        "select ulak.send('a', '{}')",
        "select ulak.send_batch('a', '{1}')",
        "select ulak.publish('e', '{}')",
    ):
        sender = connect(autocommit=False)
        sender.execute(statement)

        error = refused(db, "select ulak.drop_endpoint('a')")

        assert (error.sqlstate, error.message_primary) == ("55006", 'an open transaction may have sent to endpoint "a"')
        sender.rollback()
    db.execute("select ulak.drop_endpoint('a')")


def test_a_drop_needs_to_see_the_latest_messages(connect: Connect, db: DB) -> None:
    db.execute(CREATE, ["a", "pull", "{}"])
    admin = connect(autocommit=False)
    admin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    admin.execute("select 1")
    db.execute("select ulak.send('a', '{}')")

    assert refused(admin, "select ulak.drop_endpoint('a')").sqlstate == "25001"


def test_a_dropped_endpoint_takes_its_subscriptions_and_its_own_secret_along(db: DB) -> None:
    notices: list[str | None] = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    db.execute(CREATE, ["a", "http", json.dumps({"url": URL})])
    db.execute("select ulak.create_event_type('e')")
    db.execute("select ulak.subscribe('e', 'a')")
    db.execute("select ulak.rotate_secret('a')")

    db.execute("select ulak.drop_endpoint('a')")

    assert notices == ['dropped with endpoint "a": 1 subscription']
    query = "select count(*) from {}"
    for table in ("ulak.endpoints", "ulak.subscriptions", "ulak_private.secrets"):
        assert db.execute(query.format(table).encode()).fetchone() == (0,)


def test_others_see_an_endpoint_without_its_secrets(connect: Connect, db: DB) -> None:
    config = {
        **WHOLE,
        "auth": {"type": "basic", "username": "hunter", "password": {"$secret": "pw"}},
        "headers": {"X-Key": "hunter2"},
        "signing_secret": "hunter2hunter2",
        "url": "https://api.example.com:8443/hunter/token?key=hunter2",
    }
    db.execute("select ulak.set_secret('pw', 'hunter2')")
    db.execute("select ulak.create_endpoint('a', 'http', %s, null, 'described')", [json.dumps(config)])

    for role in ("ulak_monitor", "ulak_application"):
        session = connect(role)
        row = session.execute("select * from ulak.endpoint_list").fetchone()

        assert row is not None
        assert "hunter" not in str(row)
        (shown,) = session.execute("select config from ulak.endpoint_list").fetchone() or [{}]
        assert shown["url"] == "https://api.example.com:8443"
        assert shown["auth"] == {"type": "***", "username": "***", "password": "***"}
        assert shown["headers"] == {"X-Key": "***"}
        assert (shown["timeout"], shown["ssl_verify"], shown["retry_on"]) == (300, True, [404, "5xx"])
        assert shown["rate_limit"] == {"limit": 100, "interval": "***", "burst": 10}
        assert set(shown) == set(config)
        assert refused(session, "select config from ulak.endpoints").sqlstate == "42501"


def test_breaker_updates_stay_on_their_page_and_pass_the_trigger_by(db: DB) -> None:
    db.execute(CREATE, ["a", "http", json.dumps({"url": URL})])
    for n in range(20):
        db.execute("update ulak.endpoints set circuit_failure_count = %s, last_failure_at = now()", [n])
    db.execute("select pg_stat_force_next_flush()")

    query = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'ulak.endpoints'::regclass"
    assert db.execute(query).fetchone() == (20, 20)
    assert db.execute("select updated_at = created_at, config_version from ulak.endpoints").fetchone() == (True, 1)


@pytest.mark.parametrize("config", [{"method": "post"}, {"method": "Patch"}, {"timeout": 2.5, "connect_timeout": 0.5}])
def test_methods_in_lower_case_and_fractions_of_seconds_are_accepted(db: DB, config: dict[str, Any]) -> None:
    db.execute("select ulak.create_endpoint('web', 'http', %s)", [json.dumps({"url": URL, **config})])

    stored = db.execute("select config - 'url' from ulak.endpoints where name = 'web'").fetchone()
    assert stored == (config,)


@pytest.mark.parametrize("port", ["000080", "0", "65536", "99999999999"])
@pytest.mark.parametrize(
    ("protocol", "config"),
    [
        ("http", {"url": "https://api.example.com:%s/hook"}),
        ("nats", {"url": "nats://a:1,nats://b:%s", "subject": "s"}),
        ("kafka", {"broker": "a:1,b:%s", "topic": "t"}),
    ],
)
def test_a_port_has_at_most_five_digits(db: DB, protocol: str, config: dict[str, str], port: str) -> None:
    check = partial(db.execute, "select ulak.validate_endpoint_config(%s, %s)")
    given = json.dumps(config)
    assert check([protocol, given.replace("%s", "00443")]).fetchone() == (True,)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        check([protocol, given.replace("%s", port)])


# Grants.


@pytest.mark.parametrize("role", ["create role till in role ulak_application noinherit", "create role till"])
def test_a_grant_to_a_role_without_the_rights_of_its_kind_says_what_it_lacks(queue: Queue, role: str) -> None:
    queue.endpoint("shop")
    told: list[tuple[str | None, str | None]] = []
    queue.db.add_notice_handler(lambda notice: told.append((notice.message_primary, notice.message_hint)))
    queue.db.execute(role)  # type: ignore[arg-type]

    queue.call("grant_endpoint", "shop", "till", "send")

    ((message, fix),) = told
    assert message == 'role "till" does not have the rights of ulak_application yet'
    queue.db.execute(str(fix))  # type: ignore[arg-type]
    told.clear()
    assert queue.value("select pg_has_role('till', 'ulak_application', 'usage')") is True
    queue.call("grant_endpoint", "shop", "till", "send")
    assert told == []
