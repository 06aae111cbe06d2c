"""Documents that are applied at the same time: one after the other, and the second sees what the first has done."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.sessions import Running, wait_until_blocked

DB = psycopg.Connection[Any]
DOCUMENT = {
    "endpoints": {"one": {"protocol": "pull"}, "two": {"protocol": "pull"}},
    "event_types": {"order.placed": {}},
}


def apply(session: DB, document: Any, **options: bool) -> list[Any]:
    given = ", ".join(["%s", *(f"p_{name} => {value}" for name, value in options.items())])
    query = f"select kind, name, action from ulak.apply({given})"
    return session.execute(query, [Jsonb(document)]).fetchall()  # type: ignore[call-overload]


def test_two_deployments_of_one_document_make_it_once(db: DB, connect: Connect) -> None:
    db.execute("delete from ulak.endpoints")
    db.execute("delete from ulak.event_types where name = 'order.placed'")
    first, second = connect("ulak_admin"), connect("ulak_admin")
    with first.transaction():
        made = apply(first, DOCUMENT)
        waiting = Running(partial(apply, second, DOCUMENT))
        wait_until_blocked(second.info.backend_pid, db)

    assert len(made) == 3
    assert waiting.result() == []


def test_a_dry_run_holds_nothing_when_it_is_over(db: DB, connect: Connect) -> None:
    db.execute("delete from ulak.endpoints")
    first, second = connect("ulak_admin"), connect("ulak_admin")
    with first.transaction():
        told = apply(first, {"endpoints": DOCUMENT["endpoints"]}, dry_run=True)
        made = apply(second, {"endpoints": DOCUMENT["endpoints"]})

    assert made == told
    assert len(told) == 2


def test_endpoints_are_locked_in_the_order_of_their_ids(db: DB, connect: Connect) -> None:
    """As settling does: the session with the first lock never waits."""
    db.execute("delete from ulak.endpoints")
    db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest('{z,a}'::text[]) name")
    worker, deployment = connect("ulak_admin"), connect("ulak_admin")
    document = {"endpoints": {name: {"protocol": "pull", "description": "new"} for name in "az"}}
    with worker.transaction():
        worker.execute("update ulak.endpoints set description = 'z' where name = 'z'")
        waiting = Running(partial(apply, deployment, document))
        wait_until_blocked(deployment.info.backend_pid, db)

        worker.execute("set local lock_timeout = '5s'")
        worker.execute("update ulak.endpoints set description = 'a' where name = 'a'")

    assert [name for _, name, _ in waiting.result()] == ["a", "z"]
