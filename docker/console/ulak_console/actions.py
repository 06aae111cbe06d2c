"""What an administrator may do. Each action is previewed first, in a transaction that can't write, then confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import DictRow

Cursor = psycopg.Cursor[DictRow]
Parameters = Mapping[str, str]


class Field(NamedTuple):
    name: str
    label: str
    # What the database makes of it.
    type: str = "text"
    hint: str = ""
    is_needed: bool = False


class Preview(NamedTuple):
    """What would happen. Nothing can be confirmed where there is nothing to do."""

    said: str
    is_possible: bool = True
    rows: Sequence[Mapping[str, Any]] = ()
    command: str | None = None
    # What is confirmed: the same letters that were shown, none that died since.
    bound: Parameters | None = None


class Action(NamedTuple):
    name: str
    title: str
    fields: Sequence[Field]
    preview: Callable[[Cursor, Parameters], Preview]
    perform: Callable[[Cursor, Parameters], str]
    is_grave: bool = False


class Missing(Exception):
    """A parameter that is needed."""


def call(cursor: Cursor, function: str, types: Mapping[str, str], given: Parameters, **fixed: Any) -> DictRow:
    """The first row of ulak.function(p_name => value); what was left empty keeps its default."""
    arguments: list[sql.Composable] = [
        sql.SQL("{} => {}::{}").format(sql.SQL("p_" + name), sql.Placeholder(name), sql.SQL(type))
        for name, type in types.items()
        if given.get(name) or name in fixed
    ]
    query = sql.SQL("select * from ulak.{}({})").format(sql.SQL(function), sql.SQL(", ").join(arguments))
    row = cursor.execute(query, {**given, **fixed}).fetchone()
    assert row is not None
    return row


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def _state(cursor: Cursor, endpoint: str) -> DictRow:
    query = """
        select endpoint_name as endpoint, enabled, circuit_state, next_probe_at, pending_messages as waiting,
            dead_letters, last_error
        from ulak.get_endpoint_health(%s)
    """
    row = cursor.execute(query, [endpoint]).fetchone()
    assert row is not None
    return row


# Dead letters, by filter.

FILTERS = (
    Field("endpoint", "endpoint", hint="all, if empty"),
    Field("error_like", "error like", hint="[PERMANENT] HTTP 422%"),
    Field("since", "failed since", "timestamptz", "2026-01-31 10:00"),
    Field("until", "failed before", "timestamptz", "2026-01-31 11:00"),
    Field("filter", "payload filter", "jsonpath", '$ ? (@.customer == "x")'),
    Field("limit", "at most", "integer"),
)
RATE = Field("rate", "messages a second", "double precision", "as fast as possible, if empty")


def _types(fields: Sequence[Field]) -> dict[str, str]:
    return {field.name: field.type for field in fields}


def _preview_letters(function: str, fields: Sequence[Field]) -> Callable[[Cursor, Parameters], Preview]:
    def preview(cursor: Cursor, given: Parameters) -> Preview:
        if not given.get("until"):
            row = cursor.execute("select clock_timestamp()::text as until").fetchone()
            assert row is not None
            given = {**given, "until": row["until"]}
        found = call(cursor, function, {**_types(fields), "dry_run": "boolean"}, given, dry_run=True)
        number = _messages(found)
        return Preview(
            f"{_count(number, 'dead letter')} match{'es' if number == 1 else ''}.",
            is_possible=number > 0,
            rows=found.get("sample") or [],
            command=found.get("command"),
            bound=given,
        )

    return preview


def _perform_letters(function: str, fields: Sequence[Field], done: str) -> Callable[[Cursor, Parameters], str]:
    def perform(cursor: Cursor, given: Parameters) -> str:
        return f"{_count(_messages(call(cursor, function, _types(fields), given)), 'dead letter')} {done}."

    return perform


def _messages(row: DictRow) -> int:
    return int(row["messages"] if "messages" in row else next(iter(row.values())))


# One dead letter, or one message of the archive.


def _preview_letter(cursor: Cursor, given: Parameters) -> Preview:
    query = """
        select
            id as dead_letter, original_message_id as message, endpoint_name as endpoint, status, failed_at, last_error
        from ulak.dlq where id = %s::bigint
    """
    rows = cursor.execute(query, [_needed(given, "id")]).fetchall()
    if not rows:
        return Preview(f"Dead letter {given['id']} does not exist.", is_possible=False)
    if rows[0]["status"] != "failed":
        return Preview(f"Dead letter {given['id']} is {rows[0]['status']} already.", is_possible=False, rows=rows)
    command = f"select ulak.redrive_message({rows[0]['dead_letter']});"
    return Preview("It goes back into the queue, with a fresh retry budget.", rows=rows, command=command)


def _perform_letter(cursor: Cursor, given: Parameters) -> str:
    row = call(cursor, "redrive_message", {"dlq_id": "bigint"}, {"dlq_id": given["id"]})
    return f"Dead letter {given['id']} was redriven as message {row['redrive_message']}."


def _preview_replay(cursor: Cursor, given: Parameters) -> Preview:
    query = """
        select a.id as message, e.name as endpoint, a.status, a.created_at
        from ulak.archive a left join ulak.endpoints e on e.id = a.endpoint_id
        where a.id = %s::bigint
    """
    rows = cursor.execute(query, [_needed(given, "id")]).fetchall()
    if not rows:
        return Preview(f"Message {given['id']} is not in the archive.", is_possible=False)
    return Preview(
        "It is queued once more. Its receiver can drop it by its message id, unless it gets a new one.",
        is_possible=rows[0]["endpoint"] is not None,
        rows=rows,
        command=f"select ulak.replay_message({rows[0]['message']});",
    )


def _perform_replay(cursor: Cursor, given: Parameters) -> str:
    types = {"archive_id": "bigint", "new_message_id": "boolean"}
    row = call(cursor, "replay_message", types, {**given, "archive_id": given["id"]})
    return f"Message {given['id']} was replayed as message {row['replay_message']}."


RANGE = (
    Field("endpoint", "endpoint", is_needed=True),
    Field("from_ts", "sent since", "timestamptz", "2026-01-31 10:00", True),
    Field("to_ts", "sent before", "timestamptz", "2026-01-31 11:00", True),
    Field("status", "status", hint="completed, failed, expired, or empty"),
    Field("limit", "at most", "integer"),
    Field("new_message_id", "new message ids", "boolean", "true or false"),
)


def _replay_range(cursor: Cursor, given: Parameters, is_dry: bool) -> int:
    for field in RANGE:
        if field.is_needed:
            _needed(given, field.name)
    _state(cursor, given["endpoint"])
    row = cursor.execute("select id from ulak.endpoints where name = %s", [given["endpoint"]]).fetchone()
    assert row is not None
    types = {"endpoint_id": "bigint", "dry_run": "boolean", **_types(RANGE[1:])}
    found = call(cursor, "replay_range", types, given, endpoint_id=row["id"], dry_run=is_dry)
    return int(found["replay_range"])


def _preview_range(cursor: Cursor, given: Parameters) -> Preview:
    number = _replay_range(cursor, given, is_dry=True)
    return Preview(f"{_count(number, 'archived message')} would be queued once more.", is_possible=number > 0)


def _perform_range(cursor: Cursor, given: Parameters) -> str:
    return f"{_count(_replay_range(cursor, given, is_dry=False), 'message')} queued once more."


# Endpoints.


def _preview_switch(
    said: str, function: str, is_done: Callable[[DictRow], bool]
) -> Callable[[Cursor, Parameters], Preview]:
    def preview(cursor: Cursor, given: Parameters) -> Preview:
        state = _state(cursor, _needed(given, "endpoint"))
        quoted = cursor.execute("select quote_literal(%s) as name", [given["endpoint"]]).fetchone()
        assert quoted is not None
        if is_done(state):
            return Preview("There is nothing to do: it is so already.", is_possible=False, rows=[state])
        return Preview(said, rows=[state], command=f"select ulak.{function}({quoted['name']});")

    return preview


def _perform_switch(function: str, done: str) -> Callable[[Cursor, Parameters], str]:
    def perform(cursor: Cursor, given: Parameters) -> str:
        types = {"name": "text", "rate": "double precision"}
        changed = call(cursor, function, types, {**given, "name": given["endpoint"]})[function]
        return f"{given['endpoint']} {done}." if changed else f"{given['endpoint']} was so already."

    return perform


def _needed(given: Parameters, name: str) -> str:
    if not given.get(name):
        raise Missing(f"{name.replace('_', ' ')} is needed")
    return given[name]


ENDPOINT = Field("endpoint", "endpoint", is_needed=True)
REDRIVE = (*FILTERS, RATE)

ACTIONS = {
    action.name: action
    for action in (
        Action(
            "redrive",
            "Redrive dead letters",
            REDRIVE,
            _preview_letters("redrive", REDRIVE),
            _perform_letters("redrive", REDRIVE, "went back into the queue"),
        ),
        Action(
            "redrive_message",
            "Redrive a dead letter",
            (Field("id", "dead letter", "bigint", is_needed=True),),
            _preview_letter,
            _perform_letter,
        ),
        Action(
            "discard",
            "Discard dead letters",
            FILTERS,
            _preview_letters("discard", FILTERS),
            _perform_letters("discard", FILTERS, "discarded"),
            is_grave=True,
        ),
        Action(
            "replay",
            "Replay a message",
            (
                Field("id", "message", "bigint", is_needed=True),
                Field("new_message_id", "new message id", "boolean", "true or false"),
            ),
            _preview_replay,
            _perform_replay,
        ),
        Action("replay_range", "Replay messages", RANGE, _preview_range, _perform_range),
        Action(
            "enable",
            "Enable an endpoint",
            (ENDPOINT, RATE),
            _preview_switch(
                "Deliveries resume; what was held goes out.", "enable_endpoint", lambda state: state["enabled"]
            ),
            _perform_switch("enable_endpoint", "is enabled"),
        ),
        Action(
            "disable",
            "Disable an endpoint",
            (ENDPOINT,),
            _preview_switch(
                "Deliveries stop. Messages for it are still accepted, and held.",
                "disable_endpoint",
                lambda state: not state["enabled"],
            ),
            _perform_switch("disable_endpoint", "is disabled"),
            is_grave=True,
        ),
        Action(
            "reset",
            "Close a circuit",
            (ENDPOINT,),
            _preview_switch(
                "The circuit closes at once, and deliveries resume without a probe.",
                "reset_circuit_breaker",
                lambda state: state["circuit_state"] == "closed",
            ),
            _perform_switch("reset_circuit_breaker", "has its circuit closed"),
        ),
    )
}
