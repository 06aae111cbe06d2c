"""String literals of SQL text, as a session with standard_conforming_strings = off would read them otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator

# What is inside dollar quotes is SQL too, or has no single quotes.
_TOKEN = re.compile(
    r"""
    --[^\n]*
    | "(?:[^"]|"")*"
    | (?P<escaped>\b[eE]'(?:[^'\\]|''|\\.)*')
    | (?P<plain>'(?:[^']|'')*')
    """,
    re.VERBOSE | re.DOTALL,
)


def ambiguous(text: str) -> Iterator[tuple[int, str]]:
    """(line, literal) of each plain literal with a backslash: it depends on that setting what it says."""
    for found in _TOKEN.finditer(text):
        if found["plain"] and "\\" in found["plain"]:
            yield text.count("\n", 0, found.start()) + 1, found["plain"]
