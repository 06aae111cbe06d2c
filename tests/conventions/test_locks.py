"""sql/code/1_foundations/locks.sql lists every lock, and the claim's condition is the same wherever it is written."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from support.cluster import PROJECT

DB = psycopg.Connection[Any]

LOCK = re.compile(
    r"\bfor\s+(no\s+key\s+update|update|share|key\s+share)\b|\block\s+table\b|\bpg_(try_)?advisory_\w*lock",
    re.IGNORECASE,
)
LIST = PROJECT / "sql/code/1_foundations/locks.sql"


def listed(header: str) -> list[str]:
    """First words of the lines below this header, up to the end of its paragraph."""
    lines = LIST.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(rf"--     {header} ", line))
    names = []
    for line in lines[start + 1 :]:
        if line == "--":
            break
        if found := re.match(r"--     (\w+)", line):
            names.append(found[1])
    return sorted(names)


def without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def lock_takers(db: DB) -> list[str]:
    functions = db.execute(
        "select distinct proname, prosrc from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    )
    return sorted({name for name, body in functions if LOCK.search(without_comments(body)) and name != "python_source"})


def test_every_function_that_takes_a_lock_is_listed(db: DB) -> None:
    assert lock_takers(db) == listed("function")


def test_no_lock_is_taken_by_python() -> None:
    modules = sorted((PROJECT / "plpython").rglob("*.py"))

    assert modules
    assert [str(module) for module in modules if LOCK.search(module.read_text())] == []


def test_every_named_lock_is_listed_and_taken(db: DB) -> None:
    bodies = db.execute(
        "select prosrc from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    ).fetchall()
    taken = {
        name
        for (body,) in bodies
        for name in re.findall(r"ulak_private\.(?:try_)?lock\('(\w+)'\)", without_comments(body))
    }
    rows = [name for (name,) in db.execute('select name from ulak_private.locks order by name collate "C"')]

    assert sorted(taken) == listed("name") == rows


# What makes a message due, for every kind of claim.
DUE = ("q.next_retry_at <= p_now", "(q.expires_at is null or q.expires_at > p_now)")


def test_every_claim_has_the_same_conditions(db: DB) -> None:
    """The functions that lock what a claim leases: whatever is due, or new messages by their ids."""
    claims = {
        name: re.sub(r"\s+", " ", body)
        for name, body in db.execute(
            """
            select proname, prosrc from pg_proc
            where pronamespace::regnamespace::text in ('ulak', 'ulak_private')
                and proname in ('due_messages', 'new_messages')
            """
        )
    }

    assert sorted(claims) == ["due_messages", "new_messages"]
    assert {name: [part for part in DUE if part not in body] for name, body in claims.items()} == {
        "due_messages": [],
        "new_messages": [],
    }


def test_no_other_function_claims(db: DB) -> None:
    """Another way to claim would need the same conditions, and a line in the test above."""
    claimers = db.execute(
        """
        select proname from pg_proc
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and prosrc ~ 'processing_started_at\\s*=' order by proname
        """
    ).fetchall()

    assert [name for (name,) in claimers] == ["claim_new", "lease_messages"]
