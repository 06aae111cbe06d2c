"""Whatever a system is configured as: its document changes nothing there, and makes the same system elsewhere."""

from __future__ import annotations

from typing import Any

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

NAME = st.sampled_from(["a", "b", "it's %s", 'quote"d', "ünï", "{x}", "a b"])
EVENT = st.sampled_from(["order.placed", "order.paid", "it's", "100%", "ünï"])
TEXT = st.none() | st.sampled_from(["", "x", "it's\n%s", "***"])
FILTER = st.none() | st.sampled_from([{}, {"id": 4}, {"a": None}, {"deep": {"b": [1, None]}}])
PREDICATE = st.none() | st.sampled_from(["true", "$.total > 1000", '$."a b" == "x"', "exists($.id)"])
CONFIG: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.sampled_from(
    [
        ("pull", {}),
        ("pull", {"max_pending": 5, "rate_limit": {"limit": 3}}),
        ("log", {"max_bytes": 10}),
        ("http", {"url": "https://a.example.com/x?y=1", "headers": {"x-team": "t"}}),
        ("http", {"url": "https://b.example.com", "auth": {"type": "bearer", "token": "literal-token"}}),
        ("http", {"url": "https://b.example.com", "signing_secret": {"$secret": "key"}, "retry_on": [404, "5xx"]}),
        ("nats", {"url": ["n1.example.com", "n2.example.com"], "subject": "o", "token": {"$secret": "key"}}),
        ("kafka", {"broker": "k1:1,k2:2", "topic": "t", "headers": {"x-key": "literal"}}),
    ]
)
SETTING = st.sampled_from(
    [("http_timeout", "20"), ("http_timeout", "10"), ("cloudevents_source", "/x"), ("workers", "3")]
)

Step = tuple[str, tuple[Any, ...]]
ENDPOINT = st.builds(
    lambda name, made, policy, description: (
        "select ulak.create_endpoint(%s, %s, %s, %s, %s, 'replace')",
        (name, made[0], Jsonb(made[1]), policy and Jsonb(policy), description),
    ),
    NAME,
    CONFIG,
    st.none() | st.sampled_from([{}, {"max_retries": 3}]),
    TEXT,
)
STEPS = st.one_of(
    ENDPOINT,
    ENDPOINT,
    st.builds(lambda name: ("select ulak.disable_endpoint(%s)", (name,)), NAME),
    st.builds(lambda name: ("select ulak.rotate_secret(%s)", (name,)), NAME),
    st.builds(
        lambda name, text, schema: (
            "select ulak.create_event_type(%s, %s, %s)",
            (name, text, schema and Jsonb(schema)),
        ),
        EVENT,
        TEXT,
        st.none() | st.sampled_from([{}, {"required": ["id"]}]),
    ),
    st.builds(
        lambda event, name, filter, predicate: (
            "select ulak.subscribe(%s, %s, %s, %s::jsonpath)",
            (event, name, None if filter is None else Jsonb(filter), predicate),
        ),
        EVENT | st.sampled_from(["ulak.message.dead", "order.*", "*"]),
        NAME,
        FILTER,
        PREDICATE,
    ),
    st.builds(
        lambda enabled, text: (
            "select ulak.alter_subscription(max(id), p_enabled => %s, p_description => %s) from ulak.subscriptions",
            (enabled, text),
        ),
        st.booleans(),
        TEXT,
    ),
    st.builds(
        lambda name, right: ("select ulak.grant_endpoint(%s, 'ulak_application', %s)", (name, right)),
        NAME,
        st.sampled_from(["send", "work"]),
    ),
    st.builds(lambda event: ("select ulak.grant_event_type(%s, 'ulak_application')", (event,)), EVENT),
    st.builds(lambda setting: ("select ulak.configure(%s, %s)", setting), SETTING),
)


def changes(db: psycopg.Connection[Any], document: Any, prune: bool) -> list[Any]:
    return db.execute("select * from ulak.apply(%s, p_prune => %s)", [Jsonb(document), prune]).fetchall()


def config(db: psycopg.Connection[Any]) -> dict[str, Any]:
    row = db.execute("select ulak.config()").fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=60)
@given(steps=st.lists(STEPS, max_size=25))
def test_the_document_of_any_system_changes_nothing_there(alone: psycopg.Connection[Any], steps: list[Step]) -> None:
    with alone.transaction(force_rollback=True):
        alone.execute("select ulak.set_secret('key', 'whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXh5eg==')")
        for statement, values in steps:
            # What is refused isn't there.
            try:
                with alone.transaction():
                    alone.execute(statement, values)  # type: ignore[call-overload]
            except psycopg.Error:
                pass

        document = config(alone)

        assert "whsec_" not in str(document) and "literal-token" not in str(document)
        assert changes(alone, document, prune=False) == []
        assert changes(alone, document, prune=True) == []
        assert config(alone) == document

        changes(alone, {kind: type(entries)() for kind, entries in document.items()}, prune=True)
        emptied = config(alone)
        assert not any(emptied.values())
        for each in document["endpoints"].values():
            each["config"] = unmasked(each.get("config", {}))
        changes(alone, document, prune=False)
        again = config(alone)
        assert {**again, "endpoints": None} == {**document, "endpoints": None}
        assert again["endpoints"].keys() == document["endpoints"].keys()
        assert changes(alone, again, prune=True) == []


def unmasked(value: Any) -> Any:
    """With something in place of what a document doesn't show."""
    if isinstance(value, dict):
        return {key: unmasked(each) for key, each in value.items()}
    return "literal-again" if value == "***" else value
