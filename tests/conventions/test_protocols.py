"""One table knows every protocol: ulak_private.protocol_facts(). Whatever else a protocol needs is named after it, and is asked for here."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import psycopg
import pytest
from bench import brokers as bench
from support.brokers import PROTOCOLS as BROKERS
from support.cluster import PROJECT
from support.deliveries import SETTINGS
from ulak.transports.registry import CLIENTS, transports

DB = psycopg.Connection[Any]

FILES = {
    path.stem.rpartition("_")[2]
    for path in (PROJECT / "sql/code/2_endpoints").glob("config_*.sql")
    if path.stem != "config_shared"
}
GUIDE = (PROJECT / "sql" / "GUIDE.md").read_text()


@pytest.fixture
def db(module_session: DB) -> Any:
    """What a test does to the table is rolled back."""
    with module_session.transaction(force_rollback=True):
        # Plans may still hold the table of the test before.
        module_session.execute("discard plans")
        yield module_session


def column(db: DB, query: str) -> list[Any]:
    return [row[0] for row in db.execute(query)]  # type: ignore[arg-type]


def missing(db: DB) -> set[str]:
    """What is there for a protocol that the table doesn't have, or is not there for one that it has."""
    delivered = set(column(db, "select unnest(ulak_private.worker_protocols())"))
    known = set(column(db, "select unnest(ulak_private.protocols())"))
    functions = column(
        db, "select proname from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    )
    rules = {found[1] for name in functions if (found := re.fullmatch(r"([a-z]+)_config_rules", name))}
    described = column(db, "select description from ulak_private.parameter_help() where parameter = 'p_protocol'")
    return (
        {f"{each}: a file of its config" for each in known ^ FILES}
        | {f"{each}: a transport" for each in delivered ^ transports(SETTINGS, "1", 1, print, time.time).keys()}
        | {f"{each}: its client" for each in CLIENTS.keys() - delivered}
        | {f"{each}: rules of its config" for each in known ^ (rules - {"shared"})}
        | {f"{each}: help" for each in known if not re.search(rf"\b{each}\b", described[0])}
        | {f"{each}: tests of all brokers" for each in (delivered - {"http", "log"}) ^ set(BROKERS)}
        | {f"{each}: bench" for each in (delivered - {"http", "log"}) ^ bench.SECTIONS.keys()}
        | {
            f"{each}: the guide's table"
            for each in set(BROKERS)
            if not re.search(rf"^\| `{each}`", GUIDE, re.MULTILINE)
        }
        | {f"{each}: the guide" for each in set(BROKERS) if f"| key of `{each}` |" not in GUIDE}
    )


def test_everything_that_is_there_for_a_protocol_has_its_row(db: DB) -> None:
    assert missing(db) == set()


@pytest.mark.parametrize("protocol", sorted(FILES))
def test_a_protocol_without_its_row_is_missed_and_none_at_all(db: DB, protocol: str) -> None:
    (source,) = column(db, "select pg_get_functiondef('ulak_private.protocol_facts'::regproc)")
    without = (
        re.sub(rf",?\s*\('{protocol}',[^)]*\)", "", source)
        .replace("values\n", "values ")
        .replace("values ,", "values ")
    )
    rows = [
        row
        for row in re.findall(r"^ *(\('\w+',[^)]*\)),?$", source, re.MULTILINE)
        if not row.startswith(f"('{protocol}'")
    ]
    without = re.sub(r"values.*(?=\$function\$)", f"values {', '.join(rows)} ", source, flags=re.DOTALL)

    db.execute(without)  # type: ignore[arg-type]
    db.execute("discard plans")

    assert {each.partition(":")[0] for each in missing(db)} == {protocol}
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"unknown protocol '{protocol}'"), db.transaction():
        db.execute("select ulak.create_endpoint('shop', %s, '{}')", [protocol])


def test_hosts_stand_where_the_table_says(db: DB) -> None:
    for protocol, key in db.execute(
        "select protocol, host_key from ulak_private.protocol_facts() where host_key is not null"
    ):
        (schema,) = column(db, f"select ulak_private.config_schema('{protocol}')")

        assert key in schema["required"], protocol


def test_secrets_stand_for_keys_that_there_are(db: DB) -> None:
    for protocol, place in db.execute("select protocol, unnest(secret_places) from ulak_private.protocol_facts()"):
        key = place.partition("/")[0]
        (properties,) = column(db, f"select ulak_private.config_schema('{protocol}') -> 'properties'")

        assert key in properties, (protocol, place)


HOSTS: dict[str, tuple[dict[str, Any], str]] = {
    "http": ({"url": "https://shop.example.com:8443/hooks/a,b?token=t"}, "shop.example.com:8443"),
    "amqp": ({"host": "rabbit.example.com", "exchange": "orders"}, "rabbit.example.com"),
    "kafka": ({"broker": ["k1:9092,k2:9092", "k3:9092"], "topic": "orders"}, "k1:9092,k2:9092,k3:9092"),
    "mqtt": ({"broker": "10.0.0.5", "topic": "orders"}, "10.0.0.5"),
    "nats": ({"url": "nats://n1:4222, [::1]:4222/", "subject": "orders"}, "n1:4222,[::1]:4222"),
    "redis": ({"host": "redis.example.com", "stream_key": "orders"}, "redis.example.com"),
    "log": ({}, ""),
    "pull": ({}, ""),
}


@pytest.mark.parametrize("protocol", sorted(FILES))
def test_the_hosts_of_an_endpoint_are_shown_and_nothing_behind_them(db: DB, protocol: str) -> None:
    config, hosts = HOSTS[protocol]
    db.execute("select ulak.create_endpoint('shop', %s, %s)", [protocol, json.dumps(config)])

    (reported,) = column(db, "select ulak_private.receiver_host(config) from ulak.endpoints")
    (listed,) = column(db, "select config from ulak.endpoint_list")

    assert (reported or "") == hosts
    shown = [value for value in listed.values() if value != "***"]
    assert [re.sub("[a-z]+://", "", value) for value in shown] == ([hosts] if hosts else [])


@pytest.mark.parametrize(
    ("hosts", "shown"),
    [
        ({"$secret": "x"}, None),
        ("nats://user:password@n1:4222", "nats://n1:4222"),
        ("/secret", None),
        ("", None),
        (7, None),
        (None, None),
        ([], None),
    ],
)
def test_what_is_no_host_is_not_shown(db: DB, hosts: Any, shown: str | None) -> None:
    assert column(db, f"select ulak_private.hosts('{json.dumps(hosts)}')") == [shown]
