"""Runs the scripts of a package in turn: `python -m support.parts bench send claim` runs bench.send and bench.claim."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Without names all of them run. What starts with a dash is passed on to each."""
    package, *arguments = sys.argv[1:]
    known = sorted(path.stem for path in (TESTS / package).glob("[a-z]*.py") if "__main__" in path.read_text())
    options = [argument for argument in arguments if argument.startswith("-")]
    chosen = [argument for argument in arguments if not argument.startswith("-")] or known
    if unknown := set(chosen) - set(known):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}. There are: {', '.join(known)}")
    for part in chosen:
        sys.argv = [part, *options]
        runpy.run_module(f"{package}.{part}", run_name="__main__")


if __name__ == "__main__":
    main()
