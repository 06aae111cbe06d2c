"""Doors opened again: for attacks that can't be tried on 0.1.0 as their test has them."""

from __future__ import annotations

from mutants.model import Mutant

MUTANTS: list[Mutant] = []
