"""Secrets and configs that are written at the same time: a config never names a secret that may not go to its host."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.sessions import Running, wait_until_blocked

CREATE = """
    select ulak.create_endpoint(
        'shop', 'http', '{"url": "https://other.test/", "headers": {"x-key": {"$secret": "token"}}}'
    )
"""
BIND = "select ulak.set_secret('token', 'hush-hush', p_hosts => '{api.example.com}')"


@pytest.mark.parametrize(("first", "second"), [(CREATE, BIND), (BIND, CREATE)])
def test_whichever_comes_second_is_refused(
    db: psycopg.Connection[Any], connect: Connect, first: str, second: str
) -> None:
    db.execute("delete from ulak.endpoints")
    db.execute("select ulak.set_secret('token', 'hush-hush', p_hosts => '{}')")
    one, two = connect("ulak_admin"), connect("ulak_admin")
    with one.transaction():
        one.execute(first)  # type: ignore[call-overload]
        waiting = Running(partial(two.execute, second))
        wait_until_blocked(two.info.backend_pid, db)

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="which is bound to other hosts"):
        waiting.result()
