"""Secrets that are bound to hosts: no config makes another host learn of them."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue

SECRET = {"$secret": "token"}
HTTP = {"url": "https://api.example.com/hook"}
PROXY = {"url": "http://proxy.example.com:3128"}
OAUTH = {"type": "oauth2", "token_url": "https://id.example.com/", "client_id": "me", "client_secret": SECRET}
# A config that names the secret, and the hosts that learn of it.
USES: dict[str, tuple[str, dict[str, Any], str]] = {
    "header": ("http", {**HTTP, "headers": {"x-key": SECRET}}, "api"),
    "bearer": ("http", {**HTTP, "auth": {"type": "bearer", "token": SECRET}}, "api"),
    "basic": ("http", {**HTTP, "auth": {"type": "basic", "username": "me", "password": SECRET}}, "api"),
    "sigv4": (
        "http",
        {**HTTP, "auth": {"type": "aws_sigv4", "access_key": "a", "secret_key": SECRET, "region": "r", "service": "s"}},
        "api",
    ),
    "signature": ("http", {**HTTP, "signing_secret": SECRET}, "api"),
    "oauth2": ("http", {**HTTP, "auth": OAUTH}, "id api"),
    "through a proxy": ("http", {**HTTP, "headers": {"x-key": SECRET}, "proxy": PROXY}, "api proxy"),
    "oauth2 through a proxy": ("http", {**HTTP, "auth": OAUTH, "proxy": PROXY}, "id api proxy"),
    "proxy": ("http", {**HTTP, "proxy": {**PROXY, "username": "me", "password": SECRET}}, "proxy"),
    "amqp": (
        "amqp",
        {"host": "mq.example.com", "exchange": "o", "username": "me", "password": SECRET, "tls": True},
        "mq",
    ),
    "kafka": (
        "kafka",
        {
            "broker": "k1.example.com:9092,k2.example.com:9092",
            "topic": "o",
            "options": {
                "security.protocol": "sasl_ssl",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "me",
                "sasl.password": SECRET,
            },
        },
        "k1 k2",
    ),
    "mqtt": ("mqtt", {"broker": "m.example.com", "topic": "o", "username": "me", "password": SECRET}, "m"),
    "nats": ("nats", {"url": ["n1.example.com", "tls://n2.example.com"], "subject": "o", "token": SECRET}, "n1 n2"),
    "redis": ("redis", {"host": "r.example.com", "stream_key": "o", "password": SECRET}, "r"),
}


def full(hosts: str) -> list[str]:
    return [f"{each}.example.com" for each in hosts.split()]


def array(*hosts: str) -> str:
    return "{" + ",".join(f'"{each}"' for each in hosts) + "}"


def resolved(queue: Queue, name: str = "shop") -> dict[str, Any]:
    query = """
        select c.* from ulak.endpoints e, ulak_private.endpoint_configs(array[e.id]) c where e.name = %s
    """
    (row,) = queue.rows(query, name)
    return row


def force(queue: Queue, config: dict[str, Any], name: str = "shop") -> None:
    """As no administrator could: past the check of what is written."""
    queue.db.execute("alter table ulak.endpoints disable trigger user")
    queue.db.execute("update ulak.endpoints set config = %s where name = %s", [Jsonb(config), name])
    queue.db.execute("alter table ulak.endpoints enable trigger user")


@pytest.mark.parametrize("use", USES)
def test_a_secret_goes_to_the_hosts_that_it_is_bound_to(queue: Queue, use: str) -> None:
    protocol, config, hosts = USES[use]
    queue.call("set_secret", "token", "hush-hush", array(*full(hosts)))

    queue.endpoint("shop", config, protocol=protocol)

    assert resolved(queue)["problem"] is None
    assert "hush-hush" in json.dumps(resolved(queue)["config"])
    assert resolved(queue)["bound"] == [",".join(full(hosts))]


@pytest.mark.parametrize(
    ("use", "left_out"), [(use, place) for use, (_, _, hosts) in USES.items() for place in range(len(hosts.split()))]
)
def test_it_goes_nowhere_if_one_of_them_is_not_listed(queue: Queue, use: str, left_out: int) -> None:
    protocol, config, hosts = USES[use]
    listed = full(hosts)
    listed[left_out] = "other.example.com"
    queue.call("set_secret", "token", "hush-hush", array(*listed))
    queue.endpoint("shop", {}, protocol="pull")

    told = queue.refuses("create_endpoint", "new", protocol, config)
    with pytest.raises(psycopg.errors.InvalidParameterValue), queue.db.transaction():
        queue.db.execute("update ulak.endpoints set protocol = %s, config = %s", [protocol, Jsonb(config)])
    queue.db.execute("alter table ulak.endpoints disable trigger user")
    queue.db.execute("update ulak.endpoints set protocol = %s, config = %s", [protocol, Jsonb(config)])
    queue.db.execute("alter table ulak.endpoints enable trigger user")
    row = resolved(queue)

    assert told.sqlstate == "22023"
    assert 'names secret "token", which is bound to other hosts' in str(told.message_primary)
    assert "ulak.set_secret('token'" in str(told.message_hint)
    assert row["problem"] == 'secret "token" is bound to other hosts'
    assert (row["config"], row["signing_secrets"], row["secrets"]) == (None, [], [])


def test_a_proxy_password_needs_no_receiver_in_its_list(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush", array("proxy.example.com"))

    queue.endpoint("shop", USES["proxy"][1], protocol="http")

    assert resolved(queue)["problem"] is None


def test_a_url_that_is_a_secret_leads_where_it_may(queue: Queue) -> None:
    queue.call("set_secret", "token", "https://api.example.com/hush", array("api.example.com"))
    queue.endpoint("shop", {"url": SECRET}, protocol="http")

    told = queue.refuses("set_secret", "token", "https://evil.test/hush")

    assert resolved(queue)["config"] == {"url": "https://api.example.com/hush"}
    assert told.sqlstate == "22023"
    assert "hush" not in f"{told.message_primary}{told.message_detail}{told.message_hint}"


@pytest.mark.parametrize("hosts", ["{evil.test}", "{}"])
@pytest.mark.parametrize("value", [None, ""])
def test_to_bind_it_to_others_its_value_is_needed(queue: Queue, value: str | None, hosts: str) -> None:
    queue.call("set_secret", "token", "hush-hush", array("api.example.com"))

    told = queue.refuses("set_secret", "token", value, hosts)

    assert told.sqlstate == "22023"
    assert told.message_detail == "To bind it to other hosts its value is needed, too."
    assert queue.value("select hosts from ulak_private.secrets") == "api.example.com"


def test_a_new_value_keeps_the_hosts_unless_others_are_given(queue: Queue) -> None:
    queue.call("set_secret", "token", "one", array("API.example.com", "*.example.org"))

    queue.call("set_secret", "token", "two")
    kept = queue.value("select hosts from ulak_private.secrets")
    queue.call("set_secret", "token", "three", array("::1"))
    other = queue.value("select hosts from ulak_private.secrets")
    queue.db.execute("select ulak.set_secret('token', 'four', p_hosts => '{}')")
    none = queue.value("select hosts from ulak_private.secrets")

    assert (kept, other, none) == ("api.example.com,*.example.org", "::1", None)


def test_a_rotation_keeps_the_hosts(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush", array("api.example.com"))
    queue.endpoint("shop", {**HTTP, "signing_secret": SECRET}, protocol="http")

    queue.call("rotate_secret", "shop")
    force(queue, {"url": "https://evil.test/", "signing_secret": SECRET})

    assert resolved(queue)["problem"] is not None
    assert resolved(queue)["signing_secrets"] == []


def test_it_can_not_be_bound_past_an_endpoint_that_uses_it(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush")
    queue.endpoint("shop", USES["header"][1], protocol="http")

    told = queue.refuses("set_secret", "token", "hush-hush", array("other.example.com"))

    assert told.sqlstate == "22023"
    assert told.message_primary == (
        'invalid value or hosts of secret "token" for endpoint "shop":'
        ' $.headers.x-key names secret "token", which is bound to other hosts'
    )
    assert resolved(queue)["problem"] is None


@pytest.mark.parametrize("host", ["api.example.com:443", "https://api.example.com", "*", "a b", "a,b"])
def test_what_is_no_host_binds_nothing(queue: Queue, host: str) -> None:
    told = queue.refuses("set_secret", "token", "hush-hush", array(host))

    assert (told.sqlstate, told.message_primary) == ("22023", 'invalid hosts of secret "token"')


@pytest.mark.parametrize("hosts", ["{null}", "{api.example.com,null}"])
def test_a_host_that_is_null_does_not_unbind(queue: Queue, hosts: str) -> None:
    told = queue.refuses("set_secret", "token", "hush-hush", hosts)

    assert (told.sqlstate, told.message_primary) == ("22023", 'invalid hosts of secret "token"')


def test_the_log_tells_the_hosts_and_not_the_value(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush", array("api.example.com"))

    (entry,) = queue.rows("select event, detail from ulak.event_log where event like 'secret.%%'")

    assert entry == {"event": "secret.set", "detail": {"secret": "token", "hosts": "api.example.com"}}


# require_bound_secrets.


def test_the_setting_asks_for_hosts_of_each_secret(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush")
    queue.call("set_secret", "bound", "hush-hush", array("api.example.com"))
    queue.endpoint("shop", USES["header"][1], protocol="http")
    queue.call("configure", "require_bound_secrets", "true")

    told = queue.refuses("create_endpoint", "new", "http", USES["header"][1])
    unbound = queue.refuses("set_secret", "other", "hush-hush")
    loosened = queue.refuses("set_secret", "bound", "hush-hush", array())
    queue.endpoint("good", {**HTTP, "headers": {"x-key": {"$secret": "bound"}}}, protocol="http")

    assert resolved(queue)["problem"] == 'secret "token" is bound to no hosts, and require_bound_secrets is on'
    assert "which is bound to no hosts, and require_bound_secrets is on" in str(told.message_primary)
    assert unbound.message_primary == 'secret "other" has to be bound to hosts'
    assert loosened.sqlstate == unbound.sqlstate == told.sqlstate == "22023"
    assert resolved(queue, "good")["problem"] is None


def test_secrets_of_one_endpoint_are_bound_one_by_one(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush")
    queue.call("set_secret", "other", "hush-hush")
    queue.endpoint("shop", {**HTTP, "headers": {"a": SECRET, "b": {"$secret": "other"}}}, protocol="http")
    queue.call("configure", "require_bound_secrets", "true")

    queue.call("set_secret", "token", "hush-hush", array("api.example.com"))
    queue.call("set_secret", "other", "hush-hush", array("api.example.com"))

    assert resolved(queue)["problem"] is None


def test_a_new_signing_secret_is_bound_to_its_endpoint(queue: Queue) -> None:
    queue.call("configure", "require_bound_secrets", "true")
    queue.endpoint("shop", {**HTTP, "proxy": PROXY}, protocol="http")

    queue.call("rotate_secret", "shop")
    config = queue.value("select config from ulak.endpoints")
    told = queue.refuses("alter_endpoint", "shop", {**config, "url": "https://other.example.com/"})

    assert resolved(queue)["problem"] is None
    assert queue.value("select hosts from ulak_private.secrets") == "api.example.com,proxy.example.com"
    assert "which is bound to other hosts" in str(told.message_primary)


def test_maintenance_goes_on_beside_a_config_that_would_be_refused(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    queue.call("rotate_secret", "shop")
    queue.call("rotate_secret", "shop", grace="1 hour")
    queue.call("configure", "require_bound_secrets", "true")
    queue.call("configure", "http_allowed_hosts", "other.test")

    forgotten = queue.value("select ulak_private.forget_old_secrets(now() + interval '2 hours')")

    assert forgotten == 1


def test_curl_says_why_there_is_no_request(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-hush", array("api.example.com"))
    queue.endpoint("shop", USES["header"][1], protocol="http")
    id = queue.send()
    force(queue, {"url": "https://evil.test/", "headers": {"x-key": SECRET}})

    told = queue.refuses("curl", id)

    assert told.sqlstate == "55000"
    assert told.message_primary == f'there is no request of message {id}: secret "token" is bound to other hosts'
