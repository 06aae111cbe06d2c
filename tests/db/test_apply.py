"""apply() and config(): the configuration as one document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue

HTTP = {"url": "https://api.example.com/hook"}
DOCUMENT: dict[str, Any] = {
    "settings": {"http_timeout": 20, "http_allowed_hosts": "*.example.com", "capture_response": True},
    "endpoints": {
        "shop": {"protocol": "http", "config": HTTP, "retry_policy": {"max_retries": 3}, "description": "a shop"},
        "bank": {"protocol": "pull"},
        "off": {"protocol": "pull", "config": {"max_pending": 5}, "enabled": False},
    },
    "event_types": {
        "order.placed": {"description": "an order", "schema": {"required": ["id"]}},
        "order.paid": {},
    },
    "subscriptions": [
        {"event_type": "order.placed", "endpoint": "shop"},
        {"event_type": "order.placed", "endpoint": "bank", "filter": {"id": 4}, "enabled": False},
        {"event_type": "order.placed", "endpoint": "bank", "predicate": "$.total > 1000", "description": "large"},
        {"event_type": "ulak.message.dead", "endpoint": "bank"},
    ],
    "grants": [
        {"role": "bank_app", "endpoint": "bank", "right": "send"},
        {"role": "bank_app", "endpoint": "bank", "right": "work"},
        {"role": "bank_app", "event_type": "order.paid", "right": "publish"},
    ],
}


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.db.execute("create role bank_app")
    return queue


def apply(queue: Queue, document: Any, **options: bool) -> list[tuple[str, str, str]]:
    return [(row["kind"], row["name"], row["action"]) for row in changes(queue, document, **options)]


def changes(queue: Queue, document: Any, dry_run: bool = False, prune: bool = False) -> list[dict[str, Any]]:
    return queue.rows("select * from ulak.apply(%s, %s, %s)", Jsonb(document), dry_run, prune)


def in_order(entries: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in entries)


def config(queue: Queue) -> dict[str, Any]:
    found: dict[str, Any] = queue.value("select ulak.config()")
    return found


def test_a_document_is_made_and_then_there_is_nothing_to_do(queue: Queue) -> None:
    made = apply(queue, DOCUMENT)

    assert {kind for kind, _, _ in made} == set(DOCUMENT)
    assert len(made) == sum(map(len, DOCUMENT.values()))
    assert {action for _, _, action in made} == {"create"}
    assert apply(queue, DOCUMENT) == []
    assert apply(queue, DOCUMENT, prune=True) == []


def test_the_same_document_comes_out(queue: Queue) -> None:
    apply(queue, DOCUMENT)

    out = config(queue)

    assert out["endpoints"] == DOCUMENT["endpoints"]
    assert out["event_types"] == DOCUMENT["event_types"]
    assert out["settings"] == {"http_timeout": "20", "http_allowed_hosts": "*.example.com", "capture_response": "true"}
    expected = [dict(each) for each in DOCUMENT["subscriptions"]]
    expected[2]["predicate"] = '($."total" > 1000)'
    assert in_order(out["subscriptions"]) == in_order(expected)
    assert in_order(out["grants"]) == in_order(DOCUMENT["grants"])
    assert out["schedules"] == {}


def test_a_dry_run_says_the_same_and_changes_nothing(queue: Queue) -> None:
    empty = config(queue)
    logged = queue.value("select count(*) from ulak.event_log")

    told = changes(queue, DOCUMENT, dry_run=True)

    assert config(queue) == empty
    assert queue.value("select count(*) from ulak.event_log") == logged
    assert told == changes(queue, DOCUMENT)


def test_a_change_is_shown_by_its_keys_before_and_after(queue: Queue) -> None:
    apply(queue, DOCUMENT)
    shop = {**DOCUMENT["endpoints"]["shop"], "config": {**HTTP, "timeout": 8}, "description": "the shop"}

    (change,) = changes(queue, {"endpoints": {"shop": shop}, "settings": {"http_timeout": "20"}})

    assert change["changed"] == ["config.timeout", "description"]
    assert change["before"]["description"], change["after"]["description"] == ("a shop", "the shop")
    assert change["after"]["config"] == {"url": "https://api.example.com/***", "timeout": 8}
    assert queue.value("select config from ulak.endpoints where name = 'shop'") == {**HTTP, "timeout": 8}


def test_a_key_that_is_left_out_gets_its_default_again(queue: Queue) -> None:
    apply(queue, DOCUMENT)

    told = apply(
        queue,
        {
            "endpoints": {"shop": {"protocol": "http", "config": HTTP}},
            "event_types": {"order.placed": {}},
            "subscriptions": [{"event_type": "order.placed", "endpoint": "bank", "filter": {"id": 4}}],
        },
    )

    assert [action for _, _, action in told] == ["alter"] * 3
    assert config(queue)["endpoints"]["shop"] == {"protocol": "http", "config": HTTP}
    assert config(queue)["event_types"]["order.placed"] == {}


def test_what_is_not_named_stays_without_prune(queue: Queue) -> None:
    apply(queue, DOCUMENT)

    assert apply(queue, {kind: type(entries)() for kind, entries in DOCUMENT.items()}) == []
    assert apply(queue, {}, prune=True) == []


def test_prune_removes_what_is_not_named_of_the_kinds_that_are_there(queue: Queue) -> None:
    apply(queue, DOCUMENT)

    told = apply(queue, {"subscriptions": [], "grants": DOCUMENT["grants"][:1], "settings": {}}, prune=True)

    assert sorted({(kind, action) for kind, _, action in told}) == [
        ("grants", "revoke"),
        ("settings", "reset"),
        ("subscriptions", "drop"),
    ]
    assert len(told) == 3 + 4 + 2
    assert len(config(queue)["endpoints"]) == 3
    assert apply(queue, {kind: type(entries)() for kind, entries in DOCUMENT.items()}, prune=True)
    assert {kind: entries for kind, entries in config(queue).items() if entries} == {}


def test_an_endpoint_that_has_messages_is_disabled_and_not_dropped(queue: Queue) -> None:
    apply(queue, DOCUMENT)
    queue.send("shop")

    first = apply(queue, {"endpoints": {}}, prune=True)
    second = apply(queue, {"endpoints": {}}, prune=True)

    assert sorted(first) == [
        ("endpoints", "bank", "drop"),
        ("endpoints", "off", "drop"),
        ("endpoints", "shop", "disable"),
    ]
    assert second == []


def test_operators_switches_outlive_a_document_that_says_nothing_of_them(queue: Queue) -> None:
    apply(queue, DOCUMENT)
    queue.call("disable_endpoint", "shop")

    assert apply(queue, DOCUMENT) == []
    assert config(queue)["endpoints"]["shop"]["enabled"] is False
    told = apply(queue, {"endpoints": {"shop": {**DOCUMENT["endpoints"]["shop"], "enabled": True}}})
    assert told == [("endpoints", "shop", "alter")]
    assert queue.value("select enabled from ulak.endpoints where name = 'shop'")


def test_every_refused_entry_is_reported_and_nothing_is_changed(queue: Queue) -> None:
    apply(queue, {"endpoints": {"old": {"protocol": "pull"}}})
    before = config(queue)
    wrong = {
        "settings": {"http_timeout": "soon", "http_tiemout": 5, "batch_size": 7},
        "endpoints": {
            "good": {"protocol": "pull"},
            "typo": {"protocol": "http", "config": {"url": "https://a.test/", "timout": 5}},
            "key": {"protocol": "pull", "retries": 3},
            "secret": {"protocol": "http", "config": {"url": {"$secret": "nobody"}}},
            "old": {"protocol": "log"},
        },
        "event_types": {"ulak.mine": {}, "order.paid": {"schema": {"format": "x"}}},
        "subscriptions": [
            {"event_type": "nothing", "endpoint": "good"},
            {"event_type": "order.paid", "endpoint": "good", "predicate": "$.total >"},
            {"endpoint": "good"},
        ],
        "grants": [
            {"role": "bank_app", "right": "send"},
            {"role": "bank_app", "endpoint": "good", "event_type": "order.paid", "right": "work"},
            {"role": "bank_app", "endpoint": "good", "right": "work"},
            {"role": "bank_app", "endpoint": "good", "right": "work"},
        ],
    }

    told = queue.refuses("apply", wrong, prune=True)

    lines = str(told.message_detail).split("\n")
    assert told.sqlstate == "22023"
    assert told.message_primary == f"the document is refused: {len(lines)} of its entries cannot be applied"
    for expected in (
        # As configure() says it, with the range and the nearest name.
        "settings http_timeout: invalid value for setting http_timeout. http_timeout takes an integer from 1 to 300",
        'settings http_tiemout: unknown setting http_tiemout. select * from ulak.settings; lists them all. Did you mean "http_timeout"?',
        "endpoints typo: invalid config of http endpoint: $.timout is not a known key",
        "endpoints key: invalid entry: $.retries is not a known key",
        'endpoints secret: unknown secret "nobody"',
        'endpoints old: the protocol of endpoint "old" can not be changed',
        'event_types ulak.mine: event type "ulak.mine" is reserved',
        "invalid entry: $.event_type is required",
        'invalid grant: $.endpoint is required with "right": "send"',
        "must not name both an endpoint and an event type",
        "it is given twice",
    ):
        assert any(expected in line for line in lines), (expected, lines)
    assert config(queue) == before


@pytest.mark.parametrize("document", [{"endpoint": {}}, [], "x", 5, {"grants": {}}, {"endpoints": []}, None])
def test_what_is_no_document_is_refused(queue: Queue, document: Any) -> None:
    told = queue.refuses("apply", Jsonb(document))

    assert told.sqlstate == "22023"
    assert told.message_hint


def test_credentials_are_never_shown_and_stay_where_they_are_masked(queue: Queue) -> None:
    queue.call("set_secret", "token", "hush-token")
    shop = {
        **HTTP,
        "url": "https://api.example.com/hush-path",
        "headers": {"x-api-key": "hush-header", "x-team": "billing", "x-token": {"$secret": "token"}},
        "auth": {"type": "basic", "username": "me", "password": "hush-password"},
        "signing_secret": "hush-signing",
        "proxy": {"url": "http://p:1/hush-proxy", "username": "me", "password": "hush-proxy-password"},
    }
    kafka = {
        "broker": "k:1",
        "topic": "t",
        "options": {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "me",
            "sasl.password": "hush-sasl",
        },
    }
    told = changes(
        queue,
        {"endpoints": {"shop": {"protocol": "http", "config": shop}, "bus": {"protocol": "kafka", "config": kafka}}},
    )
    document = config(queue)

    assert "hush" not in json.dumps(told, default=str)
    assert "hush" not in json.dumps(document).replace("hush-path", "").replace("hush-proxy", "")
    assert document["endpoints"]["shop"]["config"]["headers"] == {
        "x-api-key": "***",
        "x-team": "billing",
        "x-token": {"$secret": "token"},
    }
    assert apply(queue, document, prune=True) == []
    document["endpoints"]["shop"]["config"]["timeout"] = 8
    assert apply(queue, document) == [("endpoints", "shop", "alter")]
    assert queue.value("select config from ulak.endpoints where name = 'shop'") == {**shop, "timeout": 8}
    document["endpoints"]["new"] = document["endpoints"]["bus"]
    lines = queue.refuses("apply", document).message_detail
    assert lines == (
        "endpoints new: invalid endpoint: $.config.options.sasl.password is masked, and there is no value to keep."
        ' Name a secret: {"$secret": "name"}.'
    )


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("id={payload.id}", "id={payload.id}"),
        (["{payload.id}", {"token": "t0ken"}], ["{payload.id}", {"token": "***"}]),
        ({"login": {"password": "hunter2", "user": "u"}}, {"login": {"password": "***", "user": "u"}}),
    ],
)
def test_a_body_of_any_shape_is_part_of_a_document(queue: Queue, body: Any, shown: Any) -> None:
    given = {**HTTP, "headers": {"content-type": "text/plain"}, "body": body}
    apply(queue, {"endpoints": {"shop": {"protocol": "http", "config": given}}})
    assert config(queue)["endpoints"]["shop"]["config"]["body"] == shown
    assert apply(queue, config(queue)) == []
    assert queue.value("select config -> 'body' from ulak.endpoints") == body


def test_the_signing_secret_that_rotation_made_stays_with_its_endpoint(queue: Queue) -> None:
    apply(queue, DOCUMENT)
    queue.call("rotate_secret", "shop")
    signed = queue.value("select config -> 'signing_secret' from ulak.endpoints where name = 'shop'")

    document = config(queue)
    document["endpoints"]["shop"]["config"]["timeout"] = 8

    assert apply(queue, DOCUMENT) == []
    assert "signing_secret" not in document["endpoints"]["shop"]["config"]
    assert apply(queue, document) == [("endpoints", "shop", "alter")]
    assert queue.value("select config from ulak.endpoints where name = 'shop'") == {
        **HTTP,
        "timeout": 8,
        "signing_secret": signed,
    }


def test_a_null_for_the_signing_secret_is_as_none_in_a_document(queue: Queue) -> None:
    document = {"endpoints": {"shop": {"protocol": "http", "config": {**HTTP, "signing_secret": None}}}}

    assert apply(queue, document) == [("endpoints", "shop", "create")]
    queue.call("rotate_secret", "shop")

    assert apply(queue, document) == []
    assert queue.value("select config ? 'signing_secret' from ulak.endpoints where name = 'shop'")


def test_settings_hold_for_the_endpoints_of_the_same_document(queue: Queue) -> None:
    queue.call("configure", "http_allowed_hosts", "old.test")

    apply(queue, {"settings": {}, "endpoints": {"shop": {"protocol": "http", "config": HTTP}}}, prune=True)

    assert config(queue)["settings"] == {}


def test_watches_are_part_of_a_document(queue: Queue) -> None:
    queue.db.execute("create table public.orders (id bigint primary key, total int, note text)")
    whole = {"table": "public.orders", "event_type": "order.placed"}
    part = {
        **whole,
        "operations": ["update", "insert"],
        "columns": ["id", "total"],
        "changed": ["total"],
        "condition": "$.new.total > 5",
        "ordering_key": [],
    }
    document = {"event_types": {"order.placed": {}}, "watches": [whole]}

    made = apply(queue, document)
    again = apply(queue, document, prune=True)
    (change,) = changes(queue, {"watches": [part]})
    exported = config(queue)["watches"]
    same = apply(queue, config(queue), prune=True)
    queue.db.execute("insert into public.orders values (1, 4), (2, 7)")
    gone = apply(queue, {"watches": []}, prune=True)
    triggers = queue.value("select count(*) from pg_trigger where tgrelid = 'public.orders'::regclass")

    name = '{"table": "public.orders", "event_type": "order.placed"}'
    assert made == [("event_types", "order.placed", "create"), ("watches", name, "create")]
    assert again == same == []
    assert (change["action"], change["changed"]) == (
        "alter",
        ["changed", "columns", "condition", "operations", "ordering_key"],
    )
    assert exported == [{**part, "operations": ["insert", "update"], "condition": '($."new"."total" > 5)'}]
    assert gone == [("watches", name, "drop")]
    assert triggers == 0
    assert "unknown table public.nothing" in str(
        queue.refuses("apply", {"watches": [{**whole, "table": "public.nothing"}]}).message_detail
    )


# Single ones.


def test_an_endpoint_is_replaced_if_it_exists(queue: Queue) -> None:
    first = queue.endpoint("shop", HTTP, {"max_retries": 3}, "http")

    again = queue.call("create_endpoint", "shop", "http", {**HTTP, "timeout": 8}, if_exists="replace")
    other = queue.call("create_endpoint", "new", "pull", {}, if_exists="replace")
    told = queue.refuses("create_endpoint", "shop", "pull", {}, if_exists="replace")
    unknown = queue.refuses("create_endpoint", "shop", "http", HTTP, if_exists="ignore")

    assert again == first != other
    assert queue.rows("select config, retry_policy from ulak.endpoints where name = 'shop'") == [
        {"config": {**HTTP, "timeout": 8}, "retry_policy": None}
    ]
    assert (told.sqlstate, unknown.sqlstate) == ("22023", "22023")
    assert told.message_primary == 'the protocol of endpoint "shop" can not be changed'


@pytest.mark.parametrize(
    ("patch", "merged"),
    [
        ({"timeout": 8}, {**HTTP, "timeout": 8, "headers": {"a": "1", "b": "2"}}),
        ({"headers": {"b": None, "c": "3"}}, {**HTTP, "headers": {"a": "1", "c": "3"}}),
        ({"headers": None}, HTTP),
        ({"headers": {"a": {"$secret": "token"}}}, {**HTTP, "headers": {"a": {"$secret": "token"}, "b": "2"}}),
        ({}, {**HTTP, "headers": {"a": "1", "b": "2"}}),
    ],
)
def test_keys_are_merged_into_a_config(queue: Queue, patch: Any, merged: Any) -> None:
    queue.call("set_secret", "token", "hush")
    queue.endpoint("shop", {**HTTP, "headers": {"a": "1", "b": "2"}}, protocol="http")

    queue.call("alter_endpoint", "shop", merge=Jsonb(patch))

    assert queue.value("select config from ulak.endpoints") == merged


def test_a_merge_is_checked_as_a_config_is(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")

    told = queue.refuses("alter_endpoint", "shop", merge=Jsonb({"timout": 8}))
    both = queue.refuses("alter_endpoint", "shop", HTTP, merge=Jsonb({"timeout": 8}))
    no_object = queue.refuses("alter_endpoint", "shop", merge=Jsonb([]))

    assert "$.timout is not a known key" in str(told.message_primary)
    assert both.sqlstate == no_object.sqlstate == "22023"
