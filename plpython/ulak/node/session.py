"""The session of a node: a connection by libpq. A statement is prepared once, and each call is one round
trip."""

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

# A server that owes an answer and says nothing for this long is given up, and the primary is looked for. Shorter:
# a disk that stalls costs the node's session, and what it had delivered and not stored is sent again. Longer: it is
# missed for longer after a failover. Statements end sooner by the server's own limit (ulak_private.node_parameters()).
ANSWER_SECONDS = 10.0
# An answer that took this long isn't used to read the server's clock.
_CLOCK_SECONDS = 0.5

# The server ends the session: it goes down, an operator or a timeout said so.
_ENDED = ("57P01", "57P02", "57P03", "57P05", "25P03", "08003", "08006")
_READ_ONLY = "25006"


class Lost(ConnectionError):
    """There is no connection any more. What was held comes back to the queue when its leases run out."""


class Process(Protocol):
    """What the process was told by signals."""

    # As in port.Orders.leave.
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
        # From Python's monotonic clock to the server's; measured with each report.
        self._since_monotonic = 0.0
        # No call of libpq waits, not even the last one: a frozen server takes nothing in.
        connection.nonblocking = 1
        connection.enter_pipeline_mode()

    def call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> Rows:
        try:
            # Without a BEGIN a statement is its own transaction. What can't be sent as UTF-8 fails in the server.
            return self._execute(query, types, [values.write(each) for each in arguments])
        except psycopg.Error as error:
            if error.sqlstate == CANCELLED:
                raise Cancelled from error
            raise

    def check_interrupts(self) -> None:
        """A cancel ends a statement, and the loss of the server shows where it is asked next."""

    def wake_up(self) -> SocketWakeUp | None:
        try:
            wake_up = SocketWakeUp(self._connection.socket, self._receive)
        except OSError:
            # No file descriptor is left: the worker polls instead.
            return None
        self._wake_up = wake_up
        self._process.wake = wake_up.arrived
        return wake_up

    def orders(self) -> str | None:
        return self._process.leave

    def now(self) -> float:
        # Not by this machine's clock: nobody may have set it.
        return time.monotonic() + self._since_monotonic

    def measure_clock(self) -> float:
        sent = time.monotonic()
        (row,) = self.call("select extract(epoch from clock_timestamp())::float8 as now")
        took = time.monotonic() - sent
        # The answer may have come from the beginning or the end of a slow round trip: the former one is better.
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
        """The result of what was sent last; raises the first error since the time before."""
        self._send(self._connection.pipeline_sync)
        failed = result = None
        was_none = False
        while True:
            self._await_result()
            each = self._connection.get_result()
            if each is None:
                # The end of one statement's results; twice in turn it means that the server is gone.
                if was_none or self._connection.status == pq.ConnStatus.BAD:
                    raise Lost(pq.error_message(self._connection))
                was_none = True
                continue
            was_none = False
            if each.status == pq.ExecStatus.PIPELINE_SYNC:
                break
            result = each
            if each.status == pq.ExecStatus.FATAL_ERROR:
                failed = failed or each
        self._note_notifications()
        if failed is not None:
            raise self._error(failed)
        assert result is not None
        return result

    def _await_result(self) -> None:
        """Until there is one. A host that is frozen still answers TCP, so only a limit of our own tells: after it, what
        was asked for may have been done or not, as with any connection that is lost."""
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
            # It was the primary, and has been demoted: the process looks for the new one.
            return Lost("the server has become read-only")
        return errors.error_from_result(result)

    def _receive(self) -> None:
        """Input that arrived unasked, such as notifications."""
        try:
            self._connection.consume_input()
        except psycopg.OperationalError as error:
            raise Lost(str(error)) from error
        self._note_notifications()

    def _note_notifications(self) -> None:
        while self._connection.notifies() is not None:
            if self._wake_up is not None:
                self._wake_up.arrived()
