"""The worker's way to SQL: each method is one call of one ulak function."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ulak.messages.delivery import EndpointConfig, Message
from ulak.safety import text
from ulak.sessions.session import Rows, Session
from ulak.worker.port import Busy, Claimed, Orders, Outcomes, Refused, WakeUps
from ulak.worker.tuning import LARGE_MESSAGE, LARGE_TOGETHER
from ulak.worker.wake_up import WakeUp

_OUT_OF_MEMORY = "53200"
# Stands for a text that isn't read with the claim. No JSON is empty.
_APART = ""


_COLUMNS = ("payload", "headers", "metadata")
# As text, unless that is large, which is known once it is written: a few bytes may stand for a megabyte. `offset 0`
# keeps the planner from writing it twice.
_WRITTEN = ", ".join(
    f"case when pg_column_size({each}) > {LARGE_MESSAGE} then '' else {each}::text end as {each}_text"
    for each in _COLUMNS
)
_PAYLOAD, _HEADERS, _METADATA = (
    f"case when octet_length({each}_text) > {LARGE_MESSAGE} then '' else {each}_text end" for each in _COLUMNS
)
# A body that is gone is that message's own trouble, when it is read apart.
_PAYLOAD = f"coalesce({_PAYLOAD}, '')"
_TEXTS = f"""
    array_agg({_PAYLOAD}) as payloads,
    case when count(headers) > 0 then array_agg({_HEADERS}) end as headers,
    case when count(metadata) > 0 then array_agg({_METADATA}) end as metadata,
    case when count(ordering_key) > 0 then array_agg(ordering_key) end as ordering_keys
"""
_NO_TEXTS = """
    array_agg(''::text) as payloads, null::text[] as headers, null::text[] as metadata,
    array_agg(case when ordering_key is not null then '' end) as ordering_keys
"""
# Column by column, and nothing for a column of nulls or of one endpoint: a row becomes a dict, which costs more than
# what is in it.
_CLAIM = """
    select count(id) as count, bool_or(left_out_others) as left_out_others,
        array_agg(id) as ids, array_agg(message_id) as message_ids,
        array_agg(attempt) as attempts, {texts},
        case when count(correlation_id) > 0 then array_agg(correlation_id) end as correlation_ids,
        array_agg(created_at) as created_at,
        min(endpoint_id) as endpoint_id, min(config_version) as config_version, bool_or(may_have_more) as may_have_more,
        case when min(endpoint_id) < max(endpoint_id) then array_agg(endpoint_id) end as endpoint_ids,
        case when min(endpoint_id) < max(endpoint_id) then array_agg(config_version) end as config_versions,
        case when min(endpoint_id) < max(endpoint_id) then array_agg(endpoint_id) filter (where may_have_more) end
            as have_more
    from (
        select *{written}
        from ulak_private.claim(p_worker => $1, p_limit => $2, p_lease => make_interval(secs => $3),
            p_endpoint_ids => $4, p_protocols => coalesce($9, ulak_private.worker_protocols()),
            p_rooms => row($5, $6, $7)::ulak_private.rooms, p_most_endpoints => $8)
        offset 0
    ) c
"""
_CLAIM_TYPES = ("text", "int", "float8", "bigint[]", "bigint[]", "int[]", "int", "int", "text[]")
_CLAIM_WITH_TEXTS = _CLAIM.format(texts=_TEXTS, written=", " + _WRITTEN)
_CLAIM_WITHOUT_TEXTS = _CLAIM.format(texts=_NO_TEXTS, written="")
_LIGHT_TURN = f"""
    select id, is_new, message_id, attempt, endpoint_id, config_version,
        {_PAYLOAD} as payload, {_HEADERS} as headers, {_METADATA} as metadata, correlation_id, created_at
    from (
        select *, {_WRITTEN}
        from ulak_private.light_turn($1, $2, $3, make_interval(secs => $4), $5, $6,
            p_protocols => coalesce($7, ulak_private.worker_protocols()))
        offset 0
    ) t
"""
# As columns, too: a worker may have to read thousands of configs.
_ENDPOINT_CONFIGS = """
    select array_agg(id) as ids, array_agg(name) as names, array_agg(config_version) as config_versions,
        array_agg(config::text) as configs, array_agg(protocol) as protocols,
        case when bool_or(signing_secrets <> '{}') then array_agg(to_json(signing_secrets)::text) end
            as signing_secrets,
        case when bool_or(secrets <> '{}') then array_agg(to_json(secrets)::text) end as secrets
    from ulak_private.endpoint_configs($1)
"""


def _state(error: BaseException | None) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def _is_passing(state: str) -> bool:
    """Deadlocks, a lack of memory or of disk, trouble with files, a lock: another try may succeed."""
    return state[:2] in ("40", "53", "58") or state == "55P03"


def _may_be_unreadable(error: Exception) -> bool:
    """Not if the query had to wait; but whatever can't be read may also take all memory."""
    state = _state(error.__cause__ if isinstance(error, Busy) else error)
    return not _is_passing(state) or state == _OUT_OF_MEMORY


def _is_apart(message: Message) -> bool:
    return message.payload == _APART or message.headers == _APART or message.metadata == _APART


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
        # The next claim leaves texts out, because one of them can't be returned by a query with the others.
        self._is_wary = False
        self._listens = False
        # What is raised where a text can't be returned: the server's error, or Python's own.
        self._unreadable = (session.Error, Busy, UnicodeError, RecursionError)
        self._encoding = self._call("select pg_catalog.getdatabaseencoding() as name")[0]["name"]

    def _call(
        self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = (), may_be_followed: bool = False
    ) -> Rows:
        try:
            return self.session.call(query, types, arguments, may_be_followed)
        except self.session.Error as error:
            if _is_passing(_state(error)):
                raise Busy(str(error)) from error
            raise

    def commit(self) -> None:
        self.session.commit()

    def options(self) -> WorkerOptions:
        row = self._call("select settings, version, fingerprint from ulak_private.worker_options()")[0]
        return WorkerOptions(json.loads(row["settings"]), row["version"], row["fingerprint"])

    def note_limit(self, limited_by: str | None) -> None:
        with suppress(Busy):
            self._call("select ulak_private.note_limit($1, $2)", ("int", "text"), (self.slot, limited_by))
        self.commit()

    def suspicion(self) -> int:
        """How many runs in turn ended with an error of the worker's own code."""
        found = self._call("select ulak_private.suspicion($1) as runs", ("int",), (self.slot,))[0]["runs"]
        self.commit()
        return int(found)

    def log(self, line: str) -> None:
        """Into the server's log. Not plpy.log(): that adds where it was called, and the statement."""
        self._call("select ulak_private.log($1)", ("text",), (line,))

    def check_interrupts(self) -> None:
        self.session.check_interrupts()

    def last_sent(self) -> int:
        rows = self._call("select coalesce(pg_sequence_last_value('ulak.queue_id_seq'::regclass), 0) as sent")
        return int(rows[0]["sent"])

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        rows = self._call(
            "select ulak_private.await_send($1, $2, $3) as sent",
            ("bigint", "float8", "float8"),
            (last_sent, interval, seconds),
        )
        return int(rows[0]["sent"])

    def claim(
        self,
        limit: int,
        lease: float,
        rooms: Mapping[int, int],
        room: int,
        endpoint_ids: Sequence[int] | None,
        most_endpoints: int,
    ) -> tuple[list[Claimed], bool]:
        given = (
            *(self._worker, limit, lease, endpoint_ids, list(rooms), list(rooms.values()), room, most_endpoints),
            self._protocols,
        )
        row = self._claim(given)
        claimed = _claimed(row)
        if any(_APART in (row[texts] or ()) for texts in ("payloads", "headers", "metadata")):
            claimed = self._readable(claimed)
        return claimed, bool(row["left_out_others"])

    def _claim(self, given: tuple[Any, ...]) -> Mapping[str, Any]:
        if not self._is_wary:
            try:
                return self._call(_CLAIM_WITH_TEXTS, _CLAIM_TYPES, given, may_be_followed=True)[0]
            except self._unreadable as error:
                if not _may_be_unreadable(error):
                    raise
        # One of them has a text that no query can return. Nothing was claimed: that was undone with the query.
        self._is_wary = False
        return self._call(_CLAIM_WITHOUT_TEXTS, _CLAIM_TYPES, given, may_be_followed=True)[0]

    def _readable(self, claimed: list[Claimed]) -> list[Claimed]:
        """With the texts that the claim left out. A message with one that can't be read says so, and fails alone."""
        room = LARGE_TOGETHER
        left: list[Message] = []
        readable = []
        for each in claimed:
            messages: list[Message] = []
            for message in each.messages:
                if room <= 0:
                    left.append(message)
                    continue
                if _is_apart(message):
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

    def light_turn(
        self, after: int, count: int, lease: float, delivered: Sequence[Message]
    ) -> tuple[list[Claimed], list[int]]:
        if len(delivered) > 1:
            delivered = sorted(delivered)
        try:
            rows = self._call(
                _LIGHT_TURN,
                ("text", "bigint", "int", "float8", "bigint[]", "int[]", "text[]"),
                (
                    self._worker,
                    after,
                    count,
                    lease,
                    [each.id for each in delivered],
                    [each.attempt for each in delivered],
                    self._protocols,
                ),
            )
        except self._unreadable as error:
            if not _may_be_unreadable(error):
                raise
            # Nothing was claimed or stored: the next full claim finds out which message it is.
            self._is_wary = True
            return [], []
        claimed: dict[int, Claimed] = {}
        settled = []
        for row in rows:
            if not row["is_new"]:
                settled.append(row["id"])
                continue
            endpoint_id = row["endpoint_id"]
            if endpoint_id not in claimed:
                claimed[endpoint_id] = Claimed(endpoint_id, row["config_version"], [])
            claimed[endpoint_id].messages.append(
                Message(
                    row["id"],
                    row["message_id"],
                    row["attempt"],
                    row["payload"],
                    row["headers"],
                    row["metadata"],
                    row["correlation_id"],
                    None,
                    row["created_at"],
                )
            )
        return self._readable(list(claimed.values())), settled

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]:
        ids = list(ids)
        try:
            return self._endpoint_configs(ids)
        except self._unreadable as error:
            if isinstance(error, Busy):
                raise
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
            )
        )

    def settle(self, outcomes: Outcomes) -> None:
        # Here and in report() all text from outside enters the database, whoever has brought it this far.
        if outcomes.errors is not None:
            outcomes = outcomes._replace(errors=[self.error_text(each) for each in outcomes.errors])
        if outcomes.responses is not None:
            responses = [each and self.response_text(each) for each in outcomes.responses]
            outcomes = outcomes._replace(responses=responses)
        try:
            self._call(
                "select ulak_private.settle_many($1, $2, $3, $4, $5, $6, p_requests => $7)",
                ("text", "bigint[]", "int[]", "text[]", "int[]", "jsonb[]", "int[]"),
                (self._worker, *outcomes),
                may_be_followed=True,
            )
        except self.session.Error as error:
            raise Refused(str(error)) from error

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None:
        self._call(
            "select ulak_private.release_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, delay),
            may_be_followed=True,
        )

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        rows = self._call(
            "select ulak_private.heartbeat_many($1, $2, $3, make_interval(secs => $4)) as held",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, lease),
        )
        return list(rows[0]["held"])

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        rows = self._call("select id, state from ulak_private.blocked_endpoints($1)", ("bigint[]",), (list(ids),))
        return {row["id"]: row["state"] for row in rows}

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
            # To be seen alive, with its counters, matters more than the text of an error.
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

    def sweep(self) -> None:
        self._call("select ulak_private.sweep()")

    def missing_workers(self) -> tuple[bool, set[int]]:
        """Whether there is nothing to watch, and which slots nobody runs."""
        row = self._call("select leave, slots from ulak_private.missing_workers($1)", ("text",), (self._stamp,))[0]
        self.commit()
        return row["leave"], set(row["slots"])

    def is_poller(self) -> bool:
        return bool(
            self._call("select ulak_private.is_poller($1) as is_poller", ("int",), (self.slot,))[0]["is_poller"]
        )

    def listen(self) -> WakeUp | None:
        if not self._listens and self._may_listen:
            self._listens = bool(self._call("select ulak_private.listen() as listens")[0]["listens"])
        if self._listens and self._wake_up is None:
            self._wake_up = self.session.wake_up()
            if self._wake_up is None:
                self.unlisten()
        return self._wake_up if self._listens else None

    def request_wake_ups(self) -> WakeUps:
        row = self._call("select notified_to, last_sent, has_pending from ulak_private.request_wake_ups()")[0]
        return WakeUps(row["notified_to"], row["last_sent"], row["has_pending"])

    def unlisten(self) -> None:
        self._listens = False
        self._call("unlisten ulak_bell")

    def close(self) -> None:
        if self._wake_up is not None:
            self._wake_up.close()


def _config(text: str) -> Mapping[str, Any] | None:
    """None if Python can't read it: a number of too many digits, for example. Nothing is wrong with the others."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _claimed(row: Mapping[str, Any]) -> list[Claimed]:
    """By endpoint, in the order of their turns."""
    if not row["count"]:
        return []
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
    if row["endpoint_ids"] is None:
        return [Claimed(row["endpoint_id"], row["config_version"], list(messages), row["may_have_more"])]
    found: dict[int, Claimed] = {}
    have_more = set(row["have_more"] or ())
    for message, endpoint_id, version in zip(messages, row["endpoint_ids"], row["config_versions"], strict=True):
        claimed = found.get(endpoint_id)
        if claimed is None:
            claimed = found[endpoint_id] = Claimed(endpoint_id, version, [], endpoint_id in have_more)
        claimed.messages.append(message)
    return list(found.values())
