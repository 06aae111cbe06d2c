"""The worker's calls of ulak's SQL functions, each of which is a transaction that the session commits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ulak.messages.delivery import EndpointConfig, Leases, Message, leases
from ulak.safety import text
from ulak.sessions import claims
from ulak.sessions.claims import APART, LARGE_MESSAGE, LARGE_NEW, LARGE_TOGETHER, MOST_NEW, NO_TEXTS
from ulak.sessions.session import Rows, Session, WakeUp
from ulak.worker.port import Busy, Claimed, Outcomes, Refused, Turn, Wish

_OUT_OF_MEMORY = "53200"

_TURN = """
    select last_sent, notified_to, is_empty, (claimed).*
    from ulak_private.worker_turn($1, $2, $3, $4, $5, $6, $7, p_wake_ups => $8, p_wish => case when $9 > 0
        then row($9, row($10, $11, $12), make_interval(secs => $13), $14, $15, $16, $17, $18, $19)
            ::ulak_private.wish end)
"""
_TURN_TYPES = (
    *("text", "bigint[]", "int[]", "text[]", "int[]", "jsonb[]", "int[]", "bool"),
    *("int", "bigint[]", "int[]", "int", "float8", "text[]", "bigint", "bigint[]", "int", "int", "int"),
)
# Large texts are left out. A few stored bytes may become a megabyte.
_CLAIM_NEW = f"""
    select last_sent, endpoint_id, config_version, id, message_id, attempt,
        case when pg_column_size(payload) <= {LARGE_NEW} then payload::text else '{APART}' end as payload,
        case when pg_column_size(headers) > {LARGE_NEW} then '{APART}' else headers::text end as headers,
        case when pg_column_size(metadata) > {LARGE_NEW} then '{APART}' else metadata::text end as metadata,
        correlation_id, null as ordering_key, created_at
    from ulak_private.claim_new($1, $2, $3, $4, make_interval(secs => $5), $6, row($7, $8, $9)::ulak_private.rooms)
"""
_CLAIM_NEW_TYPES = ("text", "bigint", "bigint", "int", "float8", "text[]", "bigint[]", "int[]", "int")
# $8 is how long to wait for a lock; null: as long as in a turn.
_SETTLE = """
    select from ulak_private.worker_turn(
        case
            when $8 is null or pg_catalog.set_config('lock_timeout', $8, true) <> '' then $1
        end,
        $2, $3, $4, $5, $6, $7
    )
"""
_ENDPOINT_CONFIGS = """
    select id, name, config_version, coalesce(config, 'null')::text as config, signing_secrets, secrets, protocol,
        problem, bound
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
    """No transaction is open when a method returns. A turn is one transaction, unless a claimed text has to be read
    separately. Each method may raise Busy, and those that settle Refused."""

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
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""
        self.session.check_interrupts()

    # A turn.

    def turn(self, outcomes: Outcomes | None, wish: Wish | None, lease: float, wake_ups: bool) -> Turn:
        """Settles, then claims. wake_ups asks the next senders to notify."""
        settled = self._storable(outcomes) if outcomes is not None else (None,) * len(Outcomes._fields)
        try:
            row = self._turn(settled, wish, lease, wake_ups)
        except self.session.Error as error:
            if outcomes is None:
                raise
            raise Refused(str(error)) from error
        claimed = claims.of_columns(row) if row["count"] else []
        if claimed and any(APART in (row[texts] or ()) for texts in ("payloads", "headers", "metadata")):
            claimed = self._readable(claimed)
        return Turn(claimed, bool(row["left_out_others"]), row["last_sent"], row["notified_to"], bool(row["is_empty"]))

    def _turn(self, settled: Sequence[Any], wish: Wish | None, lease: float, wake_ups: bool) -> Mapping[str, Any]:
        if wish is None:
            return self._call(_TURN, _TURN_TYPES, (self._worker, *settled, wake_ups, 0, *(None,) * 10))[0]
        asked = (
            *(wish.most, list(wish.rooms), list(wish.rooms.values()), wish.room, lease, self._protocols),
            *(wish.behind, wish.endpoint_ids, wish.most_endpoints, wish.most_visits),
        )
        given = (self._worker, *settled, wake_ups, *asked)
        try:
            return self._call(_TURN, _TURN_TYPES, (*given, LARGE_MESSAGE))[0]
        except self._unreadable as error:
            # A text that can't be read may also exhaust the memory.
            if isinstance(error, Busy) and _state(error.__cause__) != _OUT_OF_MEMORY:
                raise
        # Perhaps one of the messages has a text that no query can return. Everything was rolled back.
        return self._call(_TURN, _TURN_TYPES, (*given, NO_TEXTS))[0]

    def claim_new(self, wish: Wish, last: int | None, last_sent: int, lease: float) -> Turn | None:
        """Claims only new messages, up to this id (None: the one that was drawn last; last_sent is what is known of
        it). None if there are none, if they need a turn, or after an error."""
        rooms = (list(wish.rooms), list(wish.rooms.values()), wish.room)
        given = (self._worker, wish.behind, last, wish.most, lease, self._protocols, *rooms)
        try:
            rows = self._call(_CLAIM_NEW, _CLAIM_NEW_TYPES, given)
        except self._unreadable:
            return None
        plain = [row for row in rows if row["id"] is not None]
        if not plain:
            return None
        claimed = claims.of_rows(plain)
        if any(APART in row.values() for row in plain):
            claimed = self._readable(claimed)
        newest = max([row["id"] for row in plain])
        # There may be more behind the last one, of a sender that sent many.
        is_cut_short = len(rows) >= min(wish.most, wish.room, MOST_NEW) or newest == last
        last_sent = rows[0]["last_sent"] or max(last_sent, newest)
        return Turn(claimed, is_cut_short or len(plain) < len(rows), last_sent)

    def settle(self, outcomes: Outcomes, is_patient: bool = True) -> None:
        """Not patient: Busy after 10 ms, not 250, if another session has the endpoint locked."""
        given = (self._worker, *self._storable(outcomes), None if is_patient else "10ms")
        try:
            self._call(_SETTLE, (*_TURN_TYPES[:7], "text"), given)
        except self.session.Error as error:
            raise Refused(str(error)) from error

    def _storable(self, outcomes: Outcomes) -> Outcomes:
        """All text from outside enters the database here and in report()."""
        errors, responses = outcomes.errors, outcomes.responses
        return outcomes._replace(
            errors=errors and [self.error_text(each) for each in errors],
            responses=responses and [each and self.response_text(each) for each in responses],
        )

    def _readable(self, claimed: list[Claimed]) -> list[Claimed]:
        """Adds the texts that the claim left out. A message whose text can't be read gets a problem and fails alone."""
        room = LARGE_TOGETHER
        left: list[Message] = []
        readable = []
        for each in claimed:
            messages: list[Message] = []
            for message in each.messages:
                if room <= 0:
                    left.append(message)
                    continue
                if APART in (message.payload, message.headers, message.metadata):
                    message = self._read(message)
                    room -= len(message.payload) + len(message.metadata or "") + len(message.headers or "")
                messages.append(message)
            if messages:
                readable.append(each._replace(messages=messages))
        if left:
            self.release(leases(left), 0.0)
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
        rows = self._call(_ENDPOINT_CONFIGS, ("bigint[]",), (ids,))
        return [EndpointConfig(**{**row, "config": _config(row["config"])}) for row in rows]

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        """Of these endpoints, those that must not be sent to now, and why: open, half_open or disabled."""
        rows = self._call("select id, state from ulak_private.blocked_endpoints($1)", ("bigint[]",), (list(ids),))
        return {row["id"]: row["state"] for row in rows}

    # Leases.

    def release(self, held: Leases, delay: float) -> None:
        """Gives messages back to the queue, without using up a retry."""
        self._call(
            "select ulak_private.release_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, list(held), list(held.values()), delay),
        )

    def renew(self, held: Leases, lease: float) -> Sequence[int]:
        """Returns the ids that are still held."""
        ids: Sequence[int] = self._value(
            "select ulak_private.heartbeat_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, list(held), list(held.values()), lease),
        )
        return ids

    def sweep(self) -> None:
        """Recovers messages of dead workers and marks expired ones, unless another worker is doing it."""
        self._call("select ulak_private.sweep()")

    # The worker in its fleet.

    def check(self, settings: str) -> str | None:
        """Why to leave, if at all. stop: at once; restart: in good order, another run will follow; settings: the same,
        because they are no longer these."""
        self.check_interrupts()
        row = self._call(
            "select leave, settings from ulak_private.worker_check($1, $2)", ("int", "text"), (self.slot, self._stamp)
        )[0]
        return row["leave"] or self.session.orders() or (None if row["settings"] == settings else "settings")

    def report(self, progress: Mapping[str, Any], statistics: Sequence[Mapping[str, object]]) -> None:
        """A sign of life with the counters since the last one."""
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
        """Whether this is the worker that is notified of new messages, or looks often; the others look less often."""
        return bool(self._value("select ulak_private.is_poller($1)", ("int",), (self.slot,)))

    def listen(self) -> WakeUp | None:
        """The wake-up by which senders reach the worker, if the session supports one."""
        if not self._may_listen or not self._value("select ulak_private.listen()"):
            return None
        self._wake_up = self._wake_up or self.session.wake_up()
        if self._wake_up is None:
            self.unlisten()
        return self._wake_up

    def unlisten(self) -> None:
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
