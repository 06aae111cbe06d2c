"""help(): what there is, from the comments in the catalog."""

from __future__ import annotations

import psycopg
import pytest
from support.cluster import ROLES, Connect
from support.queue import Queue

# A node is a program, and has what it calls and nothing else.
READERS = [role for role in ROLES if role != "ulak_node"]


def test_everything_public_is_listed_and_nothing_private(queue: Queue) -> None:
    listed = queue.rows("select * from ulak.help()")

    functions = queue.column(r"select distinct proname::text from pg_proc where pronamespace = 'ulak'::regnamespace")
    assert {row["name"] for row in listed if row["kind"] in ("function", "procedure")} == set(functions)
    assert {"top", "settings", "queue"} <= {row["name"] for row in listed}
    assert [row["name"] for row in listed if row["name"].startswith("_") or not row["description"]] == []


def test_a_topic_brings_its_relatives_and_its_parameters(queue: Queue) -> None:
    rows = queue.rows("select * from ulak.help('redrive')")

    assert [row["name"] for row in rows if row["kind"] == "function"] == [
        "redrive",
        "redrive_all",
        "redrive_endpoint",
        "redrive_message",
    ]
    assert rows[0]["usage"].startswith("ulak.redrive([p_endpoint, p_since, ")
    assert "p_dry_run" in rows[0]["description"]
    assert {"name": "  p_dry_run", "usage": "boolean, default false"}.items() <= next(
        row for row in rows if row["name"].strip() == "p_dry_run"
    ).items()


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("redriv", "redrive_message"),
        ("dead", "cleanup_dlq"),
        ("ulak.Prometheus()", "metrics_text"),
        ("breaker", "reset_circuit_breaker"),
    ],
)
def test_a_word_that_is_no_name_is_searched_for(queue: Queue, word: str, found: str) -> None:
    """In names, and if none has it, in descriptions."""
    assert found in queue.column("select name from ulak.help(%s)", word)


def test_each_parameter_is_described_and_nothing_else_is(queue: Queue) -> None:
    """The texts are a list of their own: it follows the catalog."""
    parameters = queue.db.execute(
        r"""
        select p.proname::text, a.name
        from pg_proc p
        cross join unnest(p.proargnames) with ordinality a (name, number)
        where p.pronamespace = 'ulak'::regnamespace and a.number <= p.pronargs
        """
    ).fetchall()
    texts = queue.db.execute("select function_name, parameter from ulak_private.parameter_help()").fetchall()

    missing = {each for each in parameters if each not in texts and (None, each[1]) not in texts}
    stale = {
        (function, parameter)
        for function, parameter in texts
        if not any(parameter == name and function in (None, owner) for owner, name in parameters)
    }
    assert (missing, stale) == (set(), set())
    assert len(texts) == len(set(texts))


def test_the_parameters_of_send_are_described(queue: Queue) -> None:
    told = dict(
        queue.db.execute("select btrim(name), description from ulak.help('send') where kind = 'parameter'").fetchall()
    )

    assert len(told) >= 10
    assert told["p_ordering_key"].startswith("messages of one key are delivered in the order of their commits")
    assert None not in told.values()


def test_required_parameters_come_before_the_brackets(queue: Queue) -> None:
    (usage, *_) = queue.column("select usage from ulak.help('claim')")

    assert usage == "ulak.claim(p_worker, [p_limit, p_endpoint, p_lease, p_generation])"


def test_the_roles_that_may_use_it_are_shown(queue: Queue) -> None:
    told = dict(queue.db.execute("select name, roles from ulak.help()").fetchall())

    assert told["doctor"] == "ulak_admin, ulak_monitor"
    assert told["curl"] == "ulak_admin"
    assert told["help"] == ", ".join(sorted(READERS))


@pytest.mark.parametrize("name", ["top", "ULAK.TOP", "ulak.top"])
def test_a_view_is_explained_column_by_column(queue: Queue, name: str) -> None:
    rows = queue.rows("select * from ulak.help(%s)", name)

    assert rows[0]["usage"] == "select * from ulak.top;"
    assert "waiting" in [row["name"].strip() for row in rows if row["kind"] == "column" and row["description"]]


def test_a_call_can_be_pasted(queue: Queue) -> None:
    assert queue.column("select name from ulak.help('ulak.send(text, jsonb)')")[0] == "send"


def test_a_setting_has_help_as_well(queue: Queue) -> None:
    (row,) = queue.rows("select * from ulak.help('max_queue_size')")

    assert (row["kind"], row["usage"]) == ("setting", "select ulak.configure('max_queue_size', '1000000');")
    assert "an integer from 0 to 2147483647" in row["description"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("rediv", "redrive"), ("get_endpoint_helth", "get_endpoint_health"), ("max_queu_size", "max_queue_size")],
)
def test_an_unknown_name_suggests_the_nearest(queue: Queue, name: str, nearest: str) -> None:
    error = queue.refuses("help", name)

    assert error.sqlstate == "42704"
    assert error.message_hint == f'Did you mean "{nearest}"?'


@pytest.mark.parametrize("role", READERS)
def test_every_reading_role_may_ask(connect: Connect, role: str) -> None:
    assert connect(role).execute("select count(*) > 50 from ulak.help()").fetchone() == (True,)


@pytest.mark.parametrize("role", ["ulak_node", "nobody"])
def test_no_other_role_may(connect: Connect, role: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect(role).execute("select * from ulak.help()")
