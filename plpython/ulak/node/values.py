"""Converts values between Python and PostgreSQL's text format, as PL/Python does in a backend. Only the types that the
worker's statements use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_OIDS = {
    "bool": 16,
    "bigint": 20,
    "int2": 21,
    "int": 23,
    "text": 25,
    "float8": 701,
    "int[]": 1007,
    "text[]": 1009,
    "bigint[]": 1016,
    "timestamptz": 1184,
    "jsonb": 3802,
    "jsonb[]": 3807,
}
# An array element: quoted, with a backslash before each quote and backslash; or plain.
_ELEMENT = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"|([^,{}"]+)', re.DOTALL)


def oids(types: Sequence[str]) -> list[int]:
    return [_OIDS[each] for each in types]


def write(value: Any) -> bytes | None:
    """A parameter; the server knows its type."""
    if value is None:
        return None
    return _text(value).encode()


def _text(value: Any) -> str:
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a text with a zero byte can't be sent to the database")
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list | tuple):
        return "{" + ",".join([_element(each) for each in value]) + "}"
    return str(value)


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"' + _text(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _read_integers(value: bytes) -> list[Any]:
    if value == b"{}":
        return []
    elements = value[1:-1].split(b",")
    if b"NULL" in elements:
        return [None if each == b"NULL" else int(each) for each in elements]
    return list(map(int, elements))


def _read_texts(value: bytes) -> list[Any]:
    array = value.decode()[1:-1]
    if not array:
        return []
    if '"' not in array:
        return [None if each == "NULL" else each for each in array.split(",")]
    texts: list[Any] = []
    for quoted, plain in _ELEMENT.findall(array):
        if plain:
            texts.append(None if plain == "NULL" else plain)
        else:
            # Each quote has its own backslash, so the remaining backslashes come in pairs.
            texts.append(quoted.replace('\\"', '"').replace("\\\\", "\\"))
    return texts


_READERS: dict[int, Callable[[bytes], Any]] = {
    16: lambda value: value == b"t",
    20: int,
    21: int,
    23: int,
    701: float,
    1005: _read_integers,
    1007: _read_integers,
    1016: _read_integers,
    1009: _read_texts,
    1185: _read_texts,
    2951: _read_texts,
}


def reader(oid: int) -> Callable[[bytes], Any]:
    """Parser for a column of this type. Types that aren't listed arrive as text, as they do in PL/Python."""
    return _READERS.get(oid, bytes.decode)
