"""A change that breaks one thing, and the tests that have to notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    # Stands there once.
    old: str
    new: str
    tests: tuple[str, ...]
