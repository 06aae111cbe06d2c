"""Builds with a defect, to see what happens if no wall contains it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from support.cluster import PROJECT


def install_defect(db: psycopg.Connection[Any], folder: Path, module: str, before: str, after: str) -> None:
    """Replaces a text of a module of plpython/ulak in this database. A second one in the same folder adds to the first."""
    copy = folder / "plpython"
    if not copy.exists():
        shutil.copytree(PROJECT / "plpython", copy)
    path = copy / "ulak" / module
    source = path.read_text("utf-8")
    assert source.count(before) == 1
    path.write_text(source.replace(before, after), "utf-8")
    built = subprocess.run([sys.executable, copy / "embed.py"], capture_output=True, encoding="utf-8", check=True)
    db.execute(built.stdout)
