"""A login without any grant."""

from __future__ import annotations

import pytest
from support.receiver import Receiver
from support.site import Site


@pytest.mark.parametrize("lock", ["ulak_worker", "ulak_poller"])
def test_advisory_locks_hold_up_no_worker(site: Site, receiver: Receiver, lock: str) -> None:
    site.http("shop", receiver.url)
    with site.connect("nobody") as nobody:
        nobody.execute("select pg_advisory_lock(hashtext(%s), n) from generate_series(0, 32) n", [lock])
        nobody.execute("select pg_advisory_lock(hashtext(%s))", [lock])

        worker = site.start(slot=1)
        site.send()

        receiver.wait_for(1)
        assert site.value("select ulak._is_poller(1)")
        assert not worker.call.is_done()


def test_a_session_that_calls_itself_a_worker_or_a_watcher_is_neither(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    with site.connect("nobody", application_name="ulak watcher") as nobody:
        nobody.execute("select 1")

        assert site.rows("select * from ulak._watchers()") == []
