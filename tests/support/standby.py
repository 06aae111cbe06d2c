"""A standby as far as a primary can tell: it follows the log and reports the oldest transaction that it still needs."""

from __future__ import annotations

import select
import struct
import threading

import psycopg
from psycopg import pq


class Standby:
    """Physical replication over libpq; with a slot, what it reports outlives it."""

    def __init__(self, dsn: str, name: str, slot: str | None = None) -> None:
        self._connection = pq.PGconn.connect(f"{dsn} replication=true application_name={name}".encode())
        if self._connection.status != pq.ConnStatus.OK:
            raise ConnectionError(self._connection.get_error_message())
        place = self._ask("IDENTIFY_SYSTEM").get_value(0, 2)
        assert place is not None
        using = f"SLOT {slot} " if slot else ""
        self._ask(f"START_REPLICATION {using}PHYSICAL {place.decode()}", pq.ExecStatus.COPY_BOTH)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _ask(self, command: str, expected: pq.ExecStatus = pq.ExecStatus.TUPLES_OK) -> pq.abc.PGresult:
        result = self._connection.exec_(command.encode())
        if result.status != expected:
            raise ConnectionError(result.get_error_message())
        return result

    def _read(self) -> None:
        """What arrives is thrown away. A sender whose stream isn't read would never notice that it should stop."""
        while not self._closing.is_set():
            select.select([self._connection.socket], [], [], 0.05)
            with self._lock:
                try:
                    self._connection.consume_input()
                except psycopg.OperationalError:
                    return
                while (length := self._connection.get_copy_data(1)[0]) > 0:
                    pass
            if length < 0:
                return

    def hold(self, xmin: int) -> None:
        """The message that hot_standby_feedback sends: time, xmin and its epoch, catalog_xmin and its epoch."""
        with self._lock:
            self._connection.put_copy_data(struct.pack("!cqIIII", b"h", 0, xmin, 0, 0, 0))
            self._connection.flush()

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._reading.join()
        self._connection.finish()
