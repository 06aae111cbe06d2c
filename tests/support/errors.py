"""What a statement that must fail says."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest


def refused(connection: psycopg.Connection[Any], statement: str, *values: Any) -> psycopg.errors.Diagnostic:
    """The error's fields: sqlstate, message_primary, message_detail, message_hint."""
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, values)  # type: ignore[call-overload]
    return caught.value.diag
