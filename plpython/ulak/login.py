"""Whether a role can log in: asks libpq, as pg_cron will, instead of guessing from pg_hba.conf."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping

_CONNECTION_OK = 0


def problem(parameters: Mapping[str, str]) -> str | None:
    """Why a connection with these parameters fails, or None if it doesn't."""
    name = ctypes.util.find_library("pq") or "libpq.so.5"
    try:
        libpq = ctypes.CDLL(name)
    except OSError as error:
        return f"{name} can't be loaded: {error}"
    libpq.PQconnectdbParams.restype = ctypes.c_void_p
    libpq.PQerrorMessage.restype = ctypes.c_char_p
    strings = ctypes.c_char_p * (len(parameters) + 1)
    connection = ctypes.c_void_p(
        libpq.PQconnectdbParams(
            strings(*(key.encode() for key in parameters), None),
            strings(*(value.encode() for value in parameters.values()), None),
            0,
        )
    )
    failed = libpq.PQstatus(connection) != _CONNECTION_OK
    message = str(libpq.PQerrorMessage(connection).decode("utf-8", "replace")).strip() if failed else None
    libpq.PQfinish(connection)
    return message
