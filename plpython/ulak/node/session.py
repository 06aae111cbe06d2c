"""The session of a node: a connection by libpq. A statement is prepared once, and each call is one round trip."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import psycopg
from psycopg import errors, pq

from ulak.node import values
from ulak.node.wake_up import SocketWakeUp
from ulak.sessions.session import CANCELLED, Cancelled, Rows
from ulak.worker.tuning import STOP_SECONDS

# A server that doesn't answer for this long is given up, and the node looks for the primary. With less, a stalling disk
# would end the session, and what was delivered but not stored would be sent again. With more, a failover takes longer.
# Statements end sooner by the server's own limit (ulak_private.node_parameters()).
ANSWER_SECONDS = 10.0
# An answer that takes longer isn't used to set the clock.
_CLOCK_SECONDS = 0.5

# The server ended the session: it shuts down, or an operator or a time-out ended it.
_ENDED = ("57P01", "57P02", "57P03", "57P05", "25P03", "08003", "08006")
_READ_ONLY = "25006"


class Lost(ConnectionError):
    """The connection is lost. Held messages return to the queue when their leases run out."""


class Process(Protocol):
    """What the process was told by signals."""

    # As from Database.check().
    leave: str | None
    # Called when that changes.
    wake: Callable[[], None] | None

    def log(self, line: str) -> None: ...


class _Statement(NamedTuple):
    name: bytes
    columns: list[tuple[str, Callable[[bytes], Any]]]


class Connection:
    """Implements session.Session."""

    Error: type[Exception] = psycopg.Error

    def __init__(self, connection: pq.abc.PGconn, process: Process) -> None:
        self._connection = connection
        self._process = process
        self._statements: dict[str, _Statement] = {}
        self._wake_up: SocketWakeUp | None = None
        # Why it was given up.
        self._lost: str | None = None
        # The server's clock minus Python's monotonic clock; measured with each report.
        self._since_monotonic = 0.0
        # libpq must never block, not even when it closes: a frozen server reads nothing.
        connection.nonblocking = 1

    def call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        try:
            # Without BEGIN, each statement is its own transaction. Text that isn't valid UTF-8 fails in the server.
            return self._execute(query, types, [values.write(each) for each in arguments])
        except psycopg.Error as error:
            if error.sqlstate == CANCELLED:
                raise Cancelled from error
            raise

    def check_interrupts(self) -> None:
        """Nothing to check: a cancel ends a statement, and the next call notices the loss of the server."""

    def wake_up(self) -> SocketWakeUp | None:
        try:
            wake_up = SocketWakeUp(self._connection.socket, self._receive)
        except OSError:
            # Out of file descriptors: the worker polls instead.
            return None
        self._wake_up = wake_up
        self._process.wake = wake_up.arrived
        return wake_up

    def orders(self) -> str | None:
        return self._process.leave

    def now(self) -> float:
        # Not this machine's clock, which may be wrong.
        return time.monotonic() + self._since_monotonic

    def measure_clock(self) -> float:
        sent = time.monotonic()
        (row,) = self.call("select extract(epoch from clock_timestamp())::float8 as now")
        took = time.monotonic() - sent
        # After a slow round trip the server's time is uncertain: keep the former value.
        if took < _CLOCK_SECONDS or not self._since_monotonic:
            self._since_monotonic = row["now"] - sent - took / 2
        return time.time() - self.now()

    def warn(self, line: str) -> None:
        self._process.log(line)

    def close(self) -> None:
        self._process.wake = None
        self._connection.finish()

    def _execute(self, query: str, types: Sequence[str], arguments: list[bytes | None]) -> Rows:
        statement = self._statements.get(query)
        if statement is None:
            statement = self._statements[query] = self._prepare(query, types)
        self._send(self._connection.send_query_prepared, statement.name, arguments)
        result = self._finish()
        if not statement.columns:
            names = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
            statement.columns.extend((name, values.reader(result.ftype(n))) for n, name in enumerate(names))
        get = result.get_value
        return [
            {
                name: None if (value := get(row, column)) is None else read(value)
                for column, (name, read) in enumerate(statement.columns)
            }
            for row in range(result.ntuples)
        ]

    def _prepare(self, query: str, types: Sequence[str]) -> _Statement:
        name = b"ulak_%d" % len(self._statements)
        self._send(self._connection.send_prepare, name, query.encode(), values.oids(types))
        self._finish()
        return _Statement(name, [])

    def _send(self, send: Callable[..., None], *arguments: Any) -> None:
        if self._lost:
            raise Lost(self._lost)
        try:
            send(*arguments)
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error

    def _finish(self) -> pq.abc.PGresult:
        """The result of the last statement. Raises its error."""
        result = None
        while True:
            self._await_result()
            following = self._connection.get_result()
            if following is None:
                break
            result = following
        self._note_notifications()
        if result is None:
            raise Lost(pq.error_message(self._connection))
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise self._error(result)
        return result

    def _await_result(self) -> None:
        """Waits for a result. A frozen host still answers TCP, so we need our own limit. After it, the statement may
        have been executed or not, as with any lost connection."""
        connection = self._connection
        began = time.monotonic()
        try:
            while (is_unsent := connection.flush()) or connection.is_busy():
                wait = select.poll()
                wait.register(connection.socket, select.POLLIN | (select.POLLOUT if is_unsent else 0))
                if wait.poll(500):
                    connection.consume_input()
                    began = time.monotonic()
                elif time.monotonic() - began >= (STOP_SECONDS if self._process.leave == "stop" else ANSWER_SECONDS):
                    self._lost = f"the server has been silent for {time.monotonic() - began:.0f} seconds"
                    raise Lost(self._lost)
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error

    def _error(self, result: pq.abc.PGresult) -> Exception:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        if self._connection.status == pq.ConnStatus.BAD or state in _ENDED or not state:
            return Lost(pq.error_message(result))
        if state == _READ_ONLY:
            # The primary was demoted: the process looks for the new one.
            return Lost("the server has become read-only")
        return errors.error_from_result(result)

    def _receive(self) -> None:
        """Reads unrequested input, such as notifications."""
        try:
            self._connection.consume_input()
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error
        self._note_notifications()

    def _note_notifications(self) -> None:
        while self._connection.notifies() is not None:
            if self._wake_up is not None:
                self._wake_up.arrived()
