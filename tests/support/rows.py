"""At least one row in every table, for tests that carry a database from one place to another."""

from __future__ import annotations

from typing import Any

import psycopg

STATEMENTS = [
    "select ulak.create_endpoint('filled_pull', 'pull', '{}')",
    """select ulak.create_endpoint('filled_http', 'http', '{"url": "https://example.com/hook"}')""",
]


def fill(connection: psycopg.Connection[Any]) -> None:
    for statement in STATEMENTS:
        connection.execute(statement)
