"""The shipped text means the same in every database: whatever its encoding is, and however it reads backslashes."""

from __future__ import annotations

import re

from support.cluster import PROJECT
from support.literals import ambiguous

SQL = sorted(path for part in ("schema", "code", "upgrade") for path in (PROJECT / "sql" / part).rglob("*.sql"))
PYTHON = sorted((PROJECT / "plpython").rglob("*.py"))


def test_no_literal_depends_on_standard_conforming_strings() -> None:
    """Anybody may turn it off in a session of theirs; then '\\s' is an s, in the bodies of our functions too."""
    found = [f"{path.name}:{line}: {literal}" for path in SQL for line, literal in ambiguous(path.read_text())]

    assert found == [], "write E'' with doubled backslashes"


def test_what_is_shipped_is_ascii() -> None:
    """CREATE EXTENSION reads the script in the encoding of the database."""
    assert [path.name for path in (*SQL, *PYTHON) if not path.read_text("utf-8").isascii()] == []


def test_no_text_is_lowered_by_the_rules_of_the_databases_language() -> None:
    """In Turkish, the lower case of I isn't i."""
    lowered = [
        f"{path.name}: {line.strip()}"
        for path in SQL
        for line in path.read_text().splitlines()
        if re.search(r"(?<!array_)(lower|upper)\(", line) and 'collate "C"' not in line
    ]

    assert lowered == []
