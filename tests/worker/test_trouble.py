"""What goes wrong around a worker, and what it does about it: outcomes are kept, and one problem stays one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.cluster import Cluster
from support.receiver import Answer, Receiver
from support.rewritten import rewritten
from support.sessions import wait_until
from support.site import Site, WorkerSession

AT_ONCE = {"backoff": "fixed", "base_delay_seconds": 1, "max_retries": 1}


def test_a_locked_endpoint_holds_up_its_own_outcomes_only(site: Site, receiver: Receiver) -> None:
    with Receiver() as other:
        site.http("locked", receiver.url)
        site.http("free", other.url)
        # A delivery ends a row of failures, and the breaker has to know.
        site.db.execute("update ulak.endpoints set circuit_failure_count = 1 where name = 'locked'")
        worker = site.start()
        with site.connect() as administrator, administrator.transaction():
            administrator.execute("select ulak.disable_endpoint('locked')")
            held = site.send("locked")
            receiver.wait_for(1)
            sent = [site.send("free") for _ in range(20)]
            for id in sent:
                site.wait_for_status(id, "completed")
            assert site.status(held) == "processing"

        message = site.wait_for_status(held, "completed")

        assert (message["attempts"], len(receiver.requests)) == (1, 1)
        assert not worker.call.is_done()


SETTLING = "if p_ids is not null then\n"
TRIED = "raise notice 'tries % for %', p_ids, current_setting('lock_timeout');\n"


def tries(worker: WorkerSession, seconds: str) -> Counter[int]:
    """How often the worker has tried to store the outcome of each message, waiting this long for a lock."""
    tried = [re.fullmatch(rf"tries {{(.*)}} for {seconds}", notice) for notice in worker.notices]
    return Counter(int(id) for each in tried if each for id in each[1].split(","))


def test_many_locked_endpoints_hold_up_their_own_outcomes_only(site: Site, receiver: Receiver) -> None:
    """Each is waited for once for as long as a turn waits. All of them for as long, again and again, would hold up the others."""
    with Receiver() as other, rewritten(site.db, "ulak_private.worker_turn", SETTLING, SETTLING + TRIED):
        site.http("free", other.url)
        for n in range(30):
            site.http(f"locked {n}", receiver.url)
        site.db.execute("update ulak.endpoints set circuit_failure_count = 1 where name like 'locked%'")
        worker = site.start()
        with site.connect() as administrator, administrator.transaction():
            administrator.execute("select from ulak.endpoints where name like 'locked%' for update")
            held = [site.send(f"locked {n}") for n in range(30)]
            receiver.wait_for(30)
            for _ in range(5):
                site.wait_for_status(site.send("free"), "completed")
            wait_until(lambda: min(tries(worker, "10ms")[id] for id in held) >= 2, "two more tries for each")

        assert {tries(worker, "250ms")[id] for id in held} == {1}
        for id in held:
            assert site.wait_for_status(id, "completed")["attempts"] == 1


def test_a_locked_endpoint_that_is_well_holds_up_nothing(site: Site, receiver: Receiver) -> None:
    site.http("locked", receiver.url)
    site.start()
    with site.connect() as administrator, administrator.transaction():
        administrator.execute("select ulak.disable_endpoint('locked')")

        site.wait_for_status(site.send("locked"), "completed")


def test_a_worker_that_cannot_tell_about_itself_goes_on(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    worker = site.start()
    waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    with site.connect() as administrator, administrator.transaction():
        administrator.execute("select ulak.stop()")
        wait_until(lambda: site.value(waits, worker.pid), message="a report that waits")
        site.wait_for_status(site.send(), "completed")
        administrator.execute("update ulak.workers set stop_requested_at = null")

    wait_until(lambda: site.worker_row(worker)["messages_processed"] == 1)


def test_an_outcome_that_cannot_be_stored_leaves_the_others_alone(site: Site, receiver: Receiver) -> None:
    # What can't be stored comes again when its lease has ended.
    site.configure(lease_seconds=3600)
    site.http("shop", receiver.url)
    ids = site.send_many(10)
    site.db.execute(f"""
        create function public.refuse() returns trigger language plpgsql as
        $$ begin raise exception 'not this one'; end $$;
        create trigger refuse before delete on ulak_private.deliveries for each row
        when (old.id = {ids[4]}) execute function public.refuse()
    """)
    try:
        worker = site.start()
        for id in ids[:4] + ids[5:]:
            site.wait_for_status(id, "completed")

        wait_until(lambda: "not this one" in (site.worker_row(worker)["last_error"] or ""))
        assert site.status(ids[4]) == "processing"
        site.wait_for_status(site.send(), "completed")
    finally:
        site.db.execute("drop function public.refuse() cascade")


@pytest.mark.parametrize("capture", ["false", "true"])
def test_a_receivers_garbage_is_stored_or_described(site: Site, capture: str) -> None:
    garbage = bytes(range(256)) * 3
    answer = Answer(500, {"x-caf\xe9": "\xff\x01\x7f", "x-long": "y" * 5000}, garbage)
    site.configure(capture_response=capture)
    with Receiver(answer) as rude:
        site.http("rude", rude.url, {"max_retries": 0})
        worker = site.start()

        message = site.wait_for_status(site.send("rude"), "failed")

        assert message["last_error"].startswith("[RETRYABLE] HTTP 500")
        assert (message["response"] is None) == (capture == "false")
        assert not worker.call.is_done()


@pytest.fixture
def latin_site(cluster: Cluster) -> Iterator[Site]:
    """A database that can't store every character."""
    with cluster.database("latin", options="encoding latin1 locale 'C'") as name:
        cluster.install(name)
        with closing(Site(cluster, name)) as site:
            yield site


def test_a_database_of_another_encoding_takes_what_receivers_say(latin_site: Site) -> None:
    site = latin_site
    site.configure(capture_response="true")
    body = json.dumps({"why": "日本語 \U0001f600"}, ensure_ascii=False).encode()
    with Receiver(lambda request: Answer(422 if b"bad" in request.body else 200, body=body)) as receiver:
        site.http("shop", receiver.url)
        worker = site.start()
        bad = site.send("shop", {"name": "bad"})
        good = site.send("shop", {"name": "Zoë"})

        message = site.wait_for_status(bad, "failed")
        site.wait_for_status(good, "completed")

        assert message["last_error"].startswith("[PERMANENT] HTTP 422: ")
        assert {"name": "Zoë"} in [json.loads(request.body) for request in receiver.requests]
        assert not worker.call.is_done()


def test_a_worker_keeps_to_read_committed_whatever_the_default_is(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.db.execute(f"alter database {site.database} set default_transaction_isolation = 'serializable'")
    try:
        worker = site.start()
        other = site.start()
    finally:
        site.db.execute(f"alter database {site.database} reset default_transaction_isolation")

    site.send_many(300)
    site.wait_until_settled()

    assert len(receiver.requests) == 300
    assert not (worker.call.is_done() or other.call.is_done())
    locks = "select count(*) from pg_locks where mode = 'SIReadLock'"
    assert site.value(locks) == 0


def test_a_config_that_makes_no_request_fails_its_own_messages(site: Site, receiver: Receiver) -> None:
    site.http("fine", receiver.url)
    site.http("broken", receiver.url.replace("http:", "https:"), AT_ONCE, tls_ca_bundle="/nonexistent/ca.pem")
    site.start()

    broken, fine = site.send("broken"), site.send("fine")
    message = site.wait_for_status(broken, "failed")

    assert message["last_error"].startswith("[RETRYABLE] config: ")
    assert site.status(fine) == "completed"
