"""The worker's calls of ulak's SQL functions, each of which is a transaction that the session commits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ulak.messages.delivery import EndpointConfig, Message
from ulak.safety import text
from ulak.sessions.session import Rows, Session
from ulak.worker.port import Busy, Claimed, Orders, Outcomes, Refused, Turn, Wish
from ulak.worker.wake_up import WakeUp

_OUT_OF_MEMORY = "53200"
# Stands for a text that wasn't read with the claim. JSON is never empty.
_APART = ""
# Messages with a text longer than this are read one by one: so a claim of 500 returns at most 16 MB at once, of which
# PostgreSQL and PL/Python keep several copies, and a message that can't be read doesn't affect the others of its claim.
_LARGE_MESSAGE = 32_768
# No text is read with the claim.
_NO_TEXTS = -1
# How much one claim reads of large messages; the rest goes back to the queue.
_LARGE_TOGETHER = 32 * 1024 * 1024
# A claim takes messages of at most this many endpoints: of few if each has a backlog, of many if each has one or two.
_MOST_ENDPOINTS = 64

_TURN = """
    select last_sent, notified_to, is_empty, (claimed).*
    from ulak_private.worker_turn($1, $2, $3, $4, $5, $6, $7, p_wake_ups => $8, p_wish => case when $9 > 0
        then row($9, row($10, $11, $12), make_interval(secs => $13), $14, $15, $16, $17, $18, $19, $20)
            ::ulak_private.wish end)
"""
_TURN_TYPES = (
    *("text", "bigint[]", "int[]", "text[]", "int[]", "jsonb[]", "int[]", "bool"),
    *("int", "bigint[]", "int[]", "int", "float8", "text[]", "bigint", "bool", "bigint[]", "int", "int", "int"),
)
# As columns, too: a worker may have to read thousands of configs.
_ENDPOINT_CONFIGS = """
    select array_agg(id) as ids, array_agg(name) as names, array_agg(config_version) as config_versions,
        array_agg(coalesce(config, 'null')::text) as configs, array_agg(protocol) as protocols,
        case when bool_or(signing_secrets <> '{}') then array_agg(to_json(signing_secrets)::text) end
            as signing_secrets,
        case when bool_or(secrets <> '{}') then array_agg(to_json(secrets)::text) end as secrets,
        array_agg(problem) as problems,
        case when bool_or(bound <> '{}') then array_agg(to_json(bound)::text) end as bound
    from ulak_private.endpoint_configs($1)
"""


def _state(error: BaseException | None) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def _is_passing(state: str) -> bool:
    """Deadlocks, lack of memory or disk space, file errors, locks: another try may succeed."""
    return state[:2] in ("40", "53", "58") or state == "55P03"


class WorkerOptions(NamedTuple):
    settings: Mapping[str, str]
    # Of the extension.
    version: str
    # All settings as one text, to see whether they changed.
    fingerprint: str


class Database:
    """Implements port.Database over any session."""

    def __init__(
        self,
        session: Session,
        slot: int,
        worker: str,
        stamp: str,
        may_listen: bool = False,
        protocols: Sequence[str] | None = None,
    ) -> None:
        """Only messages over these protocols are claimed; None: all that workers deliver."""
        self.slot = slot
        self._protocols = protocols
        self.session = session
        self._worker = worker
        self._stamp = stamp
        self._wake_up: WakeUp | None = None
        self._may_listen = may_listen
        self._listens = False
        # Raised if a text can't be returned: the server's error, or Python's own.
        self._unreadable = (session.Error, Busy, UnicodeError, RecursionError)
        self._encoding = self._value("select pg_catalog.getdatabaseencoding()")

    def _call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        try:
            return self.session.call(query, types, arguments)
        except self.session.Error as error:
            if _is_passing(_state(error)):
                raise Busy(str(error)) from error
            raise

    def _value(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Any:
        """The only value of a query with one row and one column."""
        (value,) = self._call(query, types, arguments)[0].values()
        return value

    def options(self) -> WorkerOptions:
        row = self._call("select settings, version, fingerprint from ulak_private.worker_options()")[0]
        return WorkerOptions(json.loads(row["settings"]), row["version"], row["fingerprint"])

    def note_limit(self, limited_by: str | None) -> None:
        with suppress(Busy):
            self._call("select ulak_private.note_limit($1, $2)", ("int", "text"), (self.slot, limited_by))

    def suspicion(self) -> int:
        """How many runs in a row ended with an error of the worker's own code."""
        return int(self._value("select ulak_private.suspicion($1)", ("int",), (self.slot,)))

    def log(self, line: str) -> None:
        """Writes to the server's log. Not plpy.log(), which adds where it was called and the statement."""
        self._call("select ulak_private.log($1)", ("text",), (line,))

    def check_interrupts(self) -> None:
        self.session.check_interrupts()

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        types = ("bigint", "float8", "float8")
        return int(self._value("select ulak_private.await_send($1, $2, $3)", types, (last_sent, interval, seconds)))

    # A turn.

    def turn(self, outcomes: Outcomes | None, wish: Wish | None, lease: float, wake_ups: bool) -> Turn:
        settled = self._storable(outcomes) if outcomes is not None else (None,) * len(Outcomes._fields)
        try:
            row = self._turn(settled, wish, lease, wake_ups)
        except self.session.Error as error:
            if outcomes is None:
                raise
            raise Refused(str(error)) from error
        claimed = _claimed(row) if row["count"] else []
        if claimed and any(_APART in (row[texts] or ()) for texts in ("payloads", "headers", "metadata")):
            claimed = self._readable(claimed)
        return Turn(claimed, bool(row["left_out_others"]), row["last_sent"], row["notified_to"], bool(row["is_empty"]))

    def _turn(self, settled: Sequence[Any], wish: Wish | None, lease: float, wake_ups: bool) -> Mapping[str, Any]:
        if wish is None:
            return self._call(_TURN, _TURN_TYPES, (self._worker, *settled, wake_ups, 0, *(None,) * 11))[0]
        asked = (
            *(wish.most, list(wish.rooms), list(wish.rooms.values()), wish.room, lease, self._protocols),
            *(wish.behind, wish.is_for_all, wish.endpoint_ids, _MOST_ENDPOINTS, wish.most_visits),
        )
        given = (self._worker, *settled, wake_ups, *asked)
        try:
            return self._call(_TURN, _TURN_TYPES, (*given, _LARGE_MESSAGE))[0]
        except self._unreadable as error:
            # A text that can't be read may also exhaust the memory.
            if isinstance(error, Busy) and _state(error.__cause__) != _OUT_OF_MEMORY:
                raise
        # Perhaps one of the messages has a text that no query can return. Everything was rolled back.
        return self._call(_TURN, _TURN_TYPES, (*given, _NO_TEXTS))[0]

    def settle(self, outcomes: Outcomes) -> None:
        self.turn(outcomes, None, 0, False)

    def _storable(self, outcomes: Outcomes) -> Outcomes:
        """All text from outside enters the database here and in report()."""
        errors, responses = outcomes.errors, outcomes.responses
        return outcomes._replace(
            errors=errors and [self.error_text(each) for each in errors],
            responses=responses and [each and self.response_text(each) for each in responses],
        )

    def _readable(self, claimed: list[Claimed]) -> list[Claimed]:
        """Adds the texts that the claim left out. A message whose text can't be read gets a problem and fails alone."""
        room = _LARGE_TOGETHER
        left: list[Message] = []
        readable = []
        for each in claimed:
            messages: list[Message] = []
            for message in each.messages:
                if room <= 0:
                    left.append(message)
                    continue
                if _APART in (message.payload, message.headers, message.metadata):
                    message = self._read(message)
                    room -= len(message.payload) + len(message.metadata or "") + len(message.headers or "")
                messages.append(message)
            if messages:
                readable.append(each._replace(messages=messages))
        if left:
            self.release([each.id for each in left], [each.attempt for each in left], 0.0)
        return readable

    def _read(self, message: Message) -> Message:
        try:
            row = self._call(
                "select payload, headers, metadata, ordering_key from ulak_private.read_claimed($1, $2, $3)",
                ("text", "bigint", "int"),
                (self._worker, message.id, message.attempt),
            )[0]
        except self._unreadable as error:
            return message._replace(payload="", headers=None, metadata=None, problem=f"it can't be read: {error}")
        return message._replace(**row)

    # Endpoints.

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]:
        ids = list(ids)
        try:
            return self._endpoint_configs(ids)
        except Busy:
            raise
        except self._unreadable:
            if len(ids) == 1:
                return [EndpointConfig(ids[0], "", 0, None, ())]
        return [found for id in ids for found in self.endpoint_configs([id])]

    def _endpoint_configs(self, ids: list[int]) -> list[EndpointConfig]:
        row = self._call(_ENDPOINT_CONFIGS, ("bigint[]",), (ids,))[0]
        if row["ids"] is None:
            return []
        nothing = itertools.repeat("[]")
        return list(
            map(
                EndpointConfig,
                row["ids"],
                row["names"],
                row["config_versions"],
                map(_config, row["configs"]),
                map(json.loads, row["signing_secrets"] or nothing),
                map(json.loads, row["secrets"] or nothing),
                row["protocols"],
                row["problems"],
                map(json.loads, row["bound"] or nothing),
            )
        )

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        rows = self._call("select id, state from ulak_private.blocked_endpoints($1)", ("bigint[]",), (list(ids),))
        return {row["id"]: row["state"] for row in rows}

    # Leases.

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None:
        self._call(
            "select ulak_private.release_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, delay),
        )

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        held = self._value(
            "select ulak_private.heartbeat_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, lease),
        )
        return list(held)

    def sweep(self) -> None:
        self._call("select ulak_private.sweep()")

    # The worker in its fleet.

    def check(self) -> Orders:
        self.check_interrupts()
        row = self._call(
            "select leave, settings from ulak_private.worker_check($1, $2)", ("int", "text"), (self.slot, self._stamp)
        )[0]
        return Orders(row["leave"] or self.session.orders(), row["settings"])

    def report(self, progress: Mapping[str, Any], statistics: Sequence[Mapping[str, object]]) -> None:
        last_error = self.error_text(progress["last_error"])
        progress = {**progress, "clock_ahead": self.session.measure_clock()}
        try:
            self._report({**progress, "last_error": last_error}, statistics)
        except self.session.Error:
            if last_error is None:
                raise
            # The sign of life with its counters matters more than the exact text of an error.
            self._report({**progress, "last_error": text.plain(last_error)}, statistics)

    def _report(self, progress: Mapping[str, Any], statistics: Sequence[Mapping[str, object]]) -> None:
        self._call(
            "select ulak_private.worker_report($1, $2, $3, $4)",
            ("int", "text", "jsonb", "jsonb"),
            (self.slot, self._worker, json.dumps(progress), json.dumps(statistics)),
        )

    def error_text(self, error: str | None) -> str | None:
        return error and text.storable(text.line(error), self._encoding)

    def response_text(self, response: str) -> str:
        return text.storable(response, self._encoding)

    def missing_workers(self) -> tuple[bool, set[int]]:
        """Whether there is nothing to watch, and which worker numbers aren't running."""
        row = self._call("select leave, slots from ulak_private.missing_workers($1)", ("text",), (self._stamp,))[0]
        return row["leave"], set(row["slots"])

    def is_poller(self) -> bool:
        return bool(self._value("select ulak_private.is_poller($1)", ("int",), (self.slot,)))

    def listen(self) -> WakeUp | None:
        if not self._listens and self._may_listen:
            self._listens = bool(self._value("select ulak_private.listen()"))
        if self._listens and self._wake_up is None:
            self._wake_up = self.session.wake_up()
            if self._wake_up is None:
                self.unlisten()
        return self._wake_up if self._listens else None

    def unlisten(self) -> None:
        self._listens = False
        self._call("unlisten ulak_bell")

    def close(self) -> None:
        if self._wake_up is not None:
            self._wake_up.close()


def _config(text: str) -> Mapping[str, Any] | None:
    """None if Python can't read it, for example because a number has too many digits. Other configs aren't affected."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _claimed(row: Mapping[str, Any]) -> list[Claimed]:
    """Groups claimed messages by endpoint, in the order of their turns."""
    nothing = itertools.repeat(None)
    messages = map(
        Message,
        row["ids"],
        row["message_ids"],
        row["attempts"],
        row["payloads"],
        row["headers"] or nothing,
        row["metadata"] or nothing,
        row["correlation_ids"] or nothing,
        row["ordering_keys"] or nothing,
        row["created_at"],
    )
    found: dict[int, Claimed] = {}
    have_more = row["have_more"] or ()
    for message, endpoint_id, version in zip(messages, row["endpoint_ids"], row["config_versions"], strict=True):
        claimed = found.get(endpoint_id)
        if claimed is None:
            claimed = found[endpoint_id] = Claimed(endpoint_id, version, [], endpoint_id in have_more)
        claimed.messages.append(message)
    return list(found.values())
