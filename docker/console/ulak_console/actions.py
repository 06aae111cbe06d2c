"""What an administrator may do: a table of ulak's functions. Each is previewed in a transaction that can't write, then
confirmed.

What is confirmed is what was shown: one function builds the statement for both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import DictRow

Cursor = psycopg.Cursor[DictRow]
Parameters = Mapping[str, str]
Rows = Sequence[Mapping[str, Any]]


class Field(NamedTuple):
    """A parameter of the function, by its name without p_."""

    name: str
    label: str
    # What the database makes of it.
    type: str = "text"
    hint: str = ""
    is_needed: bool = False
    # Of a number.
    is_above_zero: bool = False


class Preview(NamedTuple):
    """What would happen. Nothing can be confirmed where there is nothing to do."""

    said: str
    is_possible: bool = True
    rows: Rows = ()
    command: str = ""
    # What is confirmed: the same messages that were shown, none that came since.
    bound: Parameters | None = None


class Action(NamedTuple):
    name: str
    title: str
    function: str
    fields: Sequence[Field]
    look: Callable[[Cursor, Action, Parameters], Preview]
    # What the page says about its result, a row.
    done: Callable[[Parameters, DictRow], str]
    is_grave: bool = False
    # Fields whose parameter has another name.
    renamed: Mapping[str, str] = {}

    def statement(self, cursor: Cursor, given: Parameters, **more: str) -> str:
        """What was left empty keeps its default."""
        values = {field.name: given[field.name] for field in self.fields if given.get(field.name)} | more
        arguments: list[sql.Composable] = [
            sql.SQL("{} => {}").format(sql.SQL("p_" + self.renamed.get(name, name)), sql.Literal(value))
            for name, value in values.items()
        ]
        if "endpoint" not in values and self.function in ("purge", "retry_now"):
            arguments.insert(0, sql.SQL("p_endpoint => null"))
        call = sql.SQL("select * from ulak.{}({});").format(sql.SQL(self.function), sql.SQL(", ").join(arguments))
        return call.as_string(cursor)

    def preview(self, cursor: Cursor, given: Parameters) -> Preview:
        found = self.look(cursor, self, given)
        return found._replace(command=self.statement(cursor, found.bound or given))

    def perform(self, cursor: Cursor, given: Parameters) -> str:
        row = cursor.execute(self.statement(cursor, given).encode()).fetchone()
        assert row is not None
        return self.done(given, row)


def problems(cursor: Cursor, action: Action, given: Parameters) -> dict[str, str]:
    """What is wrong with each field by itself."""
    found = {}
    for field in action.fields:
        value = given.get(field.name)
        if not value:
            continue
        try:
            with cursor.connection.transaction():
                query = sql.SQL("select {}::{}::text as value").format(sql.Literal(value), sql.SQL(field.type))
                row = cursor.execute(query).fetchone()
        except psycopg.Error as error:
            found[field.name] = error.diag.message_primary or str(error)
        else:
            if field.is_above_zero and row and not 0 < float(row["value"]) < float("inf"):
                found[field.name] = "must be above 0"
    return found


def field_of(action: Action, error: psycopg.Error) -> str:
    """The field that an error of the function concerns; "" if none."""
    said = f"{error.diag.message_primary} {error.diag.message_detail}"
    named = {action.renamed.get(field.name, field.name): field.name for field in action.fields}
    for word in re.findall(r"\w+", said):
        if word.removeprefix("p_") in named:
            return named[word.removeprefix("p_")]
    return ""


def of_sql(text: str) -> list[tuple[Action, dict[str, str]]]:
    """The actions that correspond to the calls in a suggested statement."""
    found = []
    for match in _CALL.finditer(text):
        for action in ACTIONS.values():
            if action.function != match["function"]:
                continue
            given, place = {}, 0
            for argument in _ARGUMENT.finditer(match["arguments"]):
                name, value = argument["name"], argument["value"]
                if value.startswith("'"):
                    value = value[1:-1].replace("''", "'")
                if name is None:
                    name, place = action.fields[place].name, place + 1
                given[name] = value
            known = {field.name for field in action.fields}
            found.append((action, {name: value for name, value in given.items() if name in known}))
            break
    return found


_LITERAL = r"(?:'(?:[^']|'')*'|\d+|true|false)"
_CALL = re.compile(rf"ulak\.(?P<function>\w+)\((?P<arguments>(?:(?:p_\w+ => )?{_LITERAL}(?:, )?)*)\)")
_ARGUMENT = re.compile(rf"(?:p_(?P<name>\w+) => )?(?P<value>{_LITERAL})")


def count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


# How an action is looked at.


def _dry(one: str) -> Callable[[Cursor, Action, Parameters], Preview]:
    """By the function's own dry run."""

    def look(cursor: Cursor, action: Action, given: Parameters) -> Preview:
        if not given.get("until") and not given.get("ids"):
            row = cursor.execute("select clock_timestamp()::text as until").fetchone()
            assert row is not None
            given = {**given, "until": row["until"]}
        found = cursor.execute(action.statement(cursor, given, dry_run="true").encode()).fetchone()
        assert found is not None
        number = found["messages"]
        said = f"{count(number, one)} match{'es' if number == 1 else ''}."
        return Preview(said, number > 0, found["sample"] or [], bound=given)

    return look


def _range(cursor: Cursor, action: Action, given: Parameters) -> Preview:
    plan = action._replace(function="replay_plan", fields=[f for f in action.fields if f.name != "new_message_id"])
    found = cursor.execute(plan.statement(cursor, given).encode()).fetchone()
    assert found is not None
    said = f"{count(found['messages'], 'finished message')} would be queued once more."
    return Preview(said, found["messages"] > 0, found["sample"] or [])


def _endpoint(said: str, is_done: Callable[[DictRow], bool]) -> Callable[[Cursor, Action, Parameters], Preview]:
    query = """
        select endpoint_name as endpoint, enabled, circuit_state, next_probe_at, pending_messages as waiting,
            dead_letters, last_error
        from ulak.get_endpoint_health(%s)
    """

    def look(cursor: Cursor, action: Action, given: Parameters) -> Preview:
        row = cursor.execute(query, [given["endpoint"]]).fetchone()
        assert row is not None
        if is_done(row):
            return Preview("There is nothing to do: it is already in this state.", False, [row])
        return Preview(said, rows=[row])

    return look


def _row(said: str, query: str, states: Sequence[str]) -> Callable[[Cursor, Action, Parameters], Preview]:
    """One message or dead letter, which has to be in one of these states."""

    def look(cursor: Cursor, action: Action, given: Parameters) -> Preview:
        rows = cursor.execute(query.encode(), [given["id"]]).fetchall()
        what = action.fields[0].label
        if not rows:
            return Preview(f"There is no such {what}: {given['id']}.", False)
        status = rows[0]["status"]
        return (
            Preview(said, rows=rows) if status in states else Preview(f"This {what} is {status} already.", False, rows)
        )

    return look


LETTER = """
    select id as dead_letter, original_message_id as message, endpoint_name as endpoint, status, failed_at, last_error,
        payload
    from ulak.dlq where id = %s::bigint
"""
MESSAGE = """
    select m.id as message, e.name as endpoint, m.status, m.attempts, m.created_at, m.next_retry_at as due,
        m.last_error, m.payload
    from ulak.messages m left join ulak.endpoints e on e.id = m.endpoint_id
    where m.id = %s::bigint
"""
FINISHED = ("completed", "failed", "expired", "cancelled")

ENDPOINT = Field("endpoint", "endpoint", is_needed=True)
ANY_ENDPOINT = Field("endpoint", "endpoint", hint="if empty: all")
ERROR = Field("error_like", "error like", hint="[PERMANENT] HTTP 422%")
FILTER = Field("filter", "payload filter", "jsonpath", "$.order > 1000")
LIMIT = Field("limit", "at most", "integer", is_above_zero=True)
RATE = Field("rate", "messages a second", "double precision", "if empty: as fast as possible", is_above_zero=True)
IDS = Field("ids", "selection", "bigint[]", "{1,2,3}")
NEW_ID = Field("new_message_id", "new message id", "boolean", "true or false")


def _times(verb: str) -> tuple[Field, Field]:
    return (
        Field("since", f"{verb} since", "timestamptz", "2026-01-31 10:00"),
        Field("until", f"{verb} before", "timestamptz", "2026-01-31 11:00"),
    )


LETTERS = (ANY_ENDPOINT, ERROR, *_times("failed"), FILTER, IDS, LIMIT)
WAITING = (ANY_ENDPOINT, *_times("sent"), FILTER, IDS, LIMIT)
ONE = Field("id", "message", "bigint", is_needed=True)


def _many(one: str, done: str) -> Callable[[Parameters, DictRow], str]:
    return lambda given, row: f"{count(row['messages'], one)} {done}."


def _switched(function: str, done: str) -> Callable[[Parameters, DictRow], str]:
    return lambda given, row: f"{given['endpoint']} {done if row[function] else 'was already in this state'}."


def _changed(function: str, done: str) -> Callable[[Parameters, DictRow], str]:
    return lambda given, row: (
        f"Message {given['id']} {done if row[function] else 'was in flight or finished: too late'}."
    )


def _pinged(given: Parameters, row: DictRow) -> str:
    took = f" within {row['milliseconds']:.0f} ms" if row["milliseconds"] is not None else ""
    return f"{given['endpoint']}: {row['outcome']}{took}. {row['error'] or ''}"


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "redrive",
            "Redrive dead letters",
            "redrive",
            (*LETTERS, RATE),
            _dry("dead letter"),
            _many("dead letter", "went back into the queue"),
        ),
        Action(
            "discard",
            "Discard dead letters",
            "discard",
            LETTERS,
            _dry("dead letter"),
            _many("dead letter", "discarded"),
            is_grave=True,
        ),
        Action(
            "retry_now",
            "Retry now",
            "retry_now",
            (*WAITING[:1], ERROR, *WAITING[1:], RATE),
            _dry("message"),
            _many("message", "made due"),
        ),
        Action(
            "purge", "Cancel messages", "purge", WAITING, _dry("message"), _many("message", "cancelled"), is_grave=True
        ),
        Action(
            "redrive_message",
            "Redrive a dead letter",
            "redrive_message",
            (Field("id", "dead letter", "bigint", is_needed=True),),
            _row("It goes back into the queue, with a fresh retry budget.", LETTER, ("failed",)),
            lambda given, row: f"Dead letter {given['id']} was redriven as message {row['redrive_message']}.",
            renamed={"id": "dlq_id"},
        ),
        Action(
            "replay",
            "Replay a message",
            "replay_message",
            (ONE, NEW_ID),
            _row(
                "It is queued once more. Its receiver can drop it by its message id, unless it gets a new one.",
                MESSAGE,
                FINISHED,
            ),
            lambda given, row: f"Message {given['id']} was replayed as message {row['replay_message']}.",
            renamed={"id": "archive_id"},
        ),
        Action(
            "cancel",
            "Cancel a message",
            "cancel",
            (ONE,),
            _row("It is not sent.", MESSAGE, ("pending",)),
            _changed("cancel", "is cancelled"),
            is_grave=True,
        ),
        Action(
            "reschedule",
            "Reschedule a message",
            "reschedule",
            (ONE, Field("at", "new time", "timestamptz", "now, or 2026-01-31 10:00", True)),
            _row("It is sent at this time.", MESSAGE, ("pending",)),
            _changed("reschedule", "has its new time"),
        ),
        Action(
            "replay_range",
            "Replay messages",
            "replay_range",
            (
                ENDPOINT,
                Field("from_ts", "sent since", "timestamptz", "2026-01-31 10:00", True),
                Field("to_ts", "sent before", "timestamptz", "2026-01-31 11:00", True),
                Field("status", "status", hint="completed, failed, expired, or empty"),
                Field("to", "to endpoint", hint="the same, if empty"),
                FILTER,
                LIMIT,
                NEW_ID,
            ),
            _range,
            lambda given, row: f"{count(row['replay_range'], 'message')} queued once more.",
        ),
        Action(
            "enable",
            "Enable",
            "enable_endpoint",
            (ENDPOINT, RATE),
            _endpoint("Deliveries resume; what was held goes out.", lambda row: row["enabled"]),
            _switched("enable_endpoint", "is enabled"),
            renamed={"endpoint": "name"},
        ),
        Action(
            "disable",
            "Disable",
            "disable_endpoint",
            (ENDPOINT,),
            _endpoint("Deliveries stop. Messages for it are still accepted, and held.", lambda row: not row["enabled"]),
            _switched("disable_endpoint", "is disabled"),
            is_grave=True,
            renamed={"endpoint": "name"},
        ),
        Action(
            "reset",
            "Close the circuit",
            "reset_circuit_breaker",
            (ENDPOINT,),
            _endpoint(
                "The circuit closes at once, and deliveries resume without a probe.",
                lambda row: row["circuit_state"] == "closed",
            ),
            _switched("reset_circuit_breaker", "has its circuit closed"),
            renamed={"endpoint": "name"},
        ),
        Action(
            "ping",
            "Ping",
            "ping",
            (ENDPOINT,),
            _endpoint("One signed request goes to it now. Queue and circuit don't notice.", lambda row: False),
            _pinged,
        ),
        Action(
            "rotate",
            "Rotate the secret",
            "rotate_secret",
            (ENDPOINT, Field("grace", "both sign for", "interval", "24 hours")),
            _endpoint("It gets a new signing secret, which is shown once.", lambda row: False),
            lambda given, row: f"The new signing secret of {given['endpoint']} is {row['rotate_secret']}",
            is_grave=True,
        ),
    )
}
