"""Sessions opened by libpq, as pg_cron opens them: to see whether a role can log in, and to start a run at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_CONNECTION_OK = 0


class LoginError(Exception):
    """Logging in or the query failed, with the message of libpq or the server."""


def log_in(parameters: Mapping[str, str]) -> None:
    """Raises LoginError if a session can't be opened with these parameters."""
    with _connected(parameters):
        pass


def leave_behind(parameters: Mapping[str, str], statement: str) -> None:
    """Logs in, starts a statement and disconnects. The statement runs on: a backend notices that its client is gone
    only when it sends something, which is at the statement's end."""
    with _connected(parameters) as (libpq, connection):
        if not libpq.PQsendQuery(connection, statement.encode()):
            raise LoginError(_text(libpq.PQerrorMessage(connection)))


@contextmanager
def _connected(parameters: Mapping[str, str]) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    libpq = _libpq()
    strings = ctypes.c_char_p * (len(parameters) + 1)
    connection = ctypes.c_void_p(
        libpq.PQconnectdbParams(
            strings(*(key.encode() for key in parameters), None),
            strings(*(value.encode() for value in parameters.values()), None),
            0,
        )
    )
    try:
        if libpq.PQstatus(connection) != _CONNECTION_OK:
            raise LoginError(_text(libpq.PQerrorMessage(connection)))
        yield libpq, connection
    finally:
        libpq.PQfinish(connection)


def _libpq() -> ctypes.CDLL:
    # Imported here, because it imports subprocess, which every worker would otherwise load.
    from ctypes.util import find_library

    name = find_library("pq") or "libpq.so.5"
    try:
        libpq = ctypes.CDLL(name)
    except OSError as error:
        raise LoginError(f"{name} can't be loaded: {error}") from error
    libpq.PQconnectdbParams.restype = ctypes.c_void_p
    libpq.PQerrorMessage.restype = ctypes.c_char_p
    return libpq


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace").strip()
