"""http_allowed_hosts: which hosts a config may name, whatever its protocol."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.queue import Queue
from ulak.safety import hosts
from ulak.safety.address import Guard

HTTP = {"url": "https://api.example.com/hook"}
# By protocol, configs of which all hosts are below example.com, and the key that leads elsewhere if it is given as here.
ELSEWHERE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("http", HTTP, {"url": "https://evil.test/hook"}, ".url"),
    ("http", HTTP, {"url": "https://api.example.com.evil.test/"}, ".url"),
    ("http", HTTP, {"url": "https://evilexample.com/"}, ".url"),
    ("http", HTTP, {"url": "https://example.com/"}, ".url"),
    ("http", HTTP, {"url": "https://127.0.0.1/a,api.example.com"}, ".url"),
    ("http", HTTP, {"url": "https://[::1]:8443/"}, ".url"),
    ("http", HTTP, {"proxy": {"url": "http://evil.test:3128"}}, ".proxy.url"),
    (
        "http",
        HTTP,
        {"auth": {"type": "oauth2", "token_url": "https://evil.test/", "client_id": "a", "client_secret": "b"}},
        ".auth.token_url",
    ),
    ("amqp", {"host": "a.example.com", "exchange": "o"}, {"host": "evil.test"}, ".host"),
    ("amqp", {"host": "a.example.com", "exchange": "o"}, {"host": "::1"}, ".host"),
    ("kafka", {"broker": "a.example.com:9092", "topic": "o"}, {"broker": "b.example.com:1,evil.test:2"}, ".broker"),
    ("kafka", {"broker": "a.example.com:9092", "topic": "o"}, {"broker": ["b.example.com:1", "[::1]:2"]}, ".broker"),
    ("mqtt", {"broker": "a.example.com", "topic": "o"}, {"broker": "10.0.0.5"}, ".broker"),
    ("nats", {"url": "nats://a.example.com", "subject": "o"}, {"url": "b.example.com:4222, tls://evil.test/"}, ".url"),
    ("redis", {"host": "a.example.com", "stream_key": "o"}, {"host": "evil.test"}, ".host"),
]


def error(queue: Queue, statement: str, *values: Any) -> Any:
    with pytest.raises(psycopg.Error) as caught, queue.db.transaction():
        queue.db.execute(statement, values)  # type: ignore[call-overload]
    return caught.value.diag


@pytest.mark.parametrize(("protocol", "config", "change", "path"), ELSEWHERE)
def test_a_config_names_no_host_that_is_not_allowed(
    queue: Queue, protocol: str, config: dict[str, Any], change: dict[str, Any], path: str
) -> None:
    queue.call("configure", "http_allowed_hosts", "*.example.com")
    queue.endpoint("good", config, protocol=protocol)
    changed = json.dumps({**config, **change})

    for statement, values in (
        ("select ulak.create_endpoint('bad', %s, %s)", (protocol, changed)),
        ("select ulak.validate_endpoint_config(%s, %s)", (protocol, changed)),
        ("select ulak.alter_endpoint('good', %s)", (changed,)),
        ("update ulak.endpoints set config = %s where name = 'good'", (changed,)),
    ):
        told = error(queue, statement, *values)
        assert told.sqlstate == "22023"
        assert f"${path} leads to a host that http_allowed_hosts does not list" in told.message_primary


@pytest.mark.parametrize(("protocol", "config", "change", "path"), ELSEWHERE)
def test_the_hint_allows_the_host(
    queue: Queue, protocol: str, config: dict[str, Any], change: dict[str, Any], path: str
) -> None:
    queue.call("configure", "http_allowed_hosts", "*.example.com")
    changed = {**config, **change}

    hint = error(queue, "select ulak.validate_endpoint_config(%s, %s)", protocol, json.dumps(changed)).message_hint
    queue.db.execute(hint.removeprefix("To allow it: "))

    queue.endpoint("shop", changed, protocol=protocol)


def test_without_a_list_every_host_may_be_called(queue: Queue) -> None:
    queue.call("configure", "http_allowed_hosts", "")

    queue.endpoint("shop", {"url": "https://anywhere.test/"}, protocol="http")


def test_protocols_without_a_host_need_none(queue: Queue) -> None:
    queue.call("configure", "http_allowed_hosts", "api.example.com")

    queue.endpoint("log", {}, protocol="log")
    queue.endpoint("pull", {}, protocol="pull")


def test_a_host_that_is_a_secret_is_checked_and_not_shown(queue: Queue) -> None:
    queue.call("set_secret", "hook", "https://hush.test/path")
    queue.call("configure", "http_allowed_hosts", "api.example.com")

    told = error(queue, """select ulak.create_endpoint('e', 'http', '{"url": {"$secret": "hook"}}')""")

    assert told.message_primary.endswith("$.url leads to a host that http_allowed_hosts does not list")
    assert "hush" not in f"{told.message_primary} {told.message_detail} {told.message_hint}"


def test_what_is_not_changed_may_stay_when_the_list_gets_shorter(queue: Queue) -> None:
    queue.call("set_secret", "token", "one")
    queue.endpoint("shop", {**HTTP, "headers": {"x": {"$secret": "token"}}}, protocol="http")
    queue.call("configure", "http_allowed_hosts", "other.test")

    queue.call("alter_endpoint", "shop", {**HTTP, "timeout": 8})
    queue.call("alter_endpoint", "shop", description="a shop")
    queue.call("set_secret", "token", "two")

    assert queue.value("select config ->> 'timeout' from ulak.endpoints") == "8"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (" API.example.com , *.Example.ORG. ", "api.example.com,*.example.org"),
        ("10.0.0.5,[::1],fd00::1", "10.0.0.5,::1,fd00::1"),
        ("my_host", "my_host"),
        ("", ""),
    ],
)
def test_hosts_are_stored_as_workers_compare_them(queue: Queue, given: str, stored: str) -> None:
    assert queue.call("configure", "http_allowed_hosts", given) == stored


@pytest.mark.parametrize(
    "given", ["a.com:443", "https://a.com", "a.com;b.com", "*", "*.", "a.*.com", "a b", "a.com,", "-a", "user@a.com"]
)
def test_what_is_no_host_is_no_setting(queue: Queue, given: str) -> None:
    told = error(queue, "select ulak.configure('http_allowed_hosts', %s)", given)

    assert told.sqlstate == "22023"
    queue.db.execute(told.message_hint)


LABEL = st.sampled_from(["a", "b", "example", "com", "x-1", "*", "", "10", "::1"])
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(host=NAME, names=st.lists(NAME, min_size=1, max_size=4))
def test_the_worker_judges_a_host_as_the_database_does(
    alone: psycopg.Connection[Any], host: str, names: list[str]
) -> None:
    row = alone.execute(
        """
        select l, ulak_private.is_listed(ulak_private.host_of(%s || ':80'), l)
        from ulak_private.host_list(%s) l
        """,
        [f"[{host}]" if ":" in host else host, names],
    ).fetchone()
    assert row is not None
    stored, is_listed = row
    if stored is None or not host.strip(".") or (":" in host and host != "::1"):
        return

    assert (Guard(hosts=hosts.allowed(stored)).host_refusal(host) is None) is (is_listed or stored == "")
