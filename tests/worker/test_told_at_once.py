"""Problems are reported as soon as they occur, with their cause and what to do about them: no test sleeps in between."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from support.hostile import Hostile, never_answers
from support.ports import closed_port
from support.receiver import Answer, Listener, Receiver
from support.sessions import wait_until, wait_until_gone
from support.site import Site

ONCE = {"max_retries": 0}


def findings(site: Site, check: str) -> list[dict[str, Any]]:
    return site.rows('select severity, finding, fix from ulak.doctor() where "check" = %s', check)


def health(site: Site, component: str) -> tuple[str, str]:
    (row,) = site.rows("select status, details from ulak.health_check() where component = %s", component)
    return row["status"], row["details"]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, "it refuses our credentials"),
        (301, "it has moved, and redirects are not followed"),
        (404, "there is nothing at its url, or not for this method"),
    ],
)
def test_an_answer_that_needs_a_person_is_reported_with_its_cause(site: Site, status: int, cause: str) -> None:
    with Receiver(Answer(status)) as receiver:
        site.http("shop", receiver.url)
        site.start()

        site.wait_for_status(site.send(), "failed")

        (finding,) = findings(site, "failing")
        assert finding["severity"] == "warning"
        assert finding["finding"].startswith(f'endpoint "shop" fails: {cause}. ')
        assert finding["finding"].endswith(f"[PERMANENT] HTTP {status}")
        site.db.execute(finding["fix"])
        assert health(site, "endpoints") == ("warning", "1 endpoint, failing: shop")


def test_an_endpoint_that_succeeds_again_is_no_longer_reported(site: Site) -> None:
    with Receiver(lambda request: Answer(401 if b"bad" in request.body else 200)) as receiver:
        site.http("shop", receiver.url)
        site.start()
        site.wait_for_status(site.send(payload={"name": "bad"}), "failed")
        assert len(findings(site, "failing")) == 1

        site.wait_for_status(site.send(), "completed")

        assert findings(site, "failing") == []


def test_a_receiver_that_does_not_answer_in_time_is_reported_after_three_attempts(site: Site) -> None:
    with Hostile(never_answers) as receiver:
        site.http("slow", receiver.url, ONCE, timeout=1)
        site.start()
        site.db.execute("update ulak.endpoints set last_success_at = now() - interval '1 hour'")

        for id in [site.send("slow") for _ in range(3)]:
            site.wait_for_status(id, "failed")

        # A worker reports its counts once a second.
        (finding,) = wait_until(lambda: findings(site, "failing"), message="the finding")
        assert finding["finding"].startswith(
            'endpoint "slow" fails: it does not answer in time. 3 attempts in five minutes, none succeeded; the last one was '
        )
        (told,) = site.rows("select p50, p95, slowest from ulak.top")
        longest, shown = site.db.execute("""
            select max(latency_max_ms), ulak_private.short_duration(max(latency_max_ms) * interval '1 ms') from ulak.endpoint_stats
        """).fetchone() or (0, "")
        assert longest >= 1000
        percentiles = site.rows("select p50_ms, p95_ms from ulak.get_endpoint_health('slow')")[0]
        assert percentiles["p50_ms"] <= percentiles["p95_ms"] <= longest
        assert told["slowest"].strip() == shown


def test_the_first_failure_of_a_receiver_that_was_never_up_is_reported(site: Site) -> None:
    site.http("shop", f"http://127.0.0.1:{closed_port()}/hook")
    site.start()

    site.wait_for_error(site.send(), "[RETRYABLE]")

    (finding,) = findings(site, "failing")
    assert finding["finding"].startswith('endpoint "shop" fails: nothing answers at its address. ')
    assert finding["fix"].startswith("select * from ulak.ping('shop');")


class Plain(Listener):
    """Answers whatever it reads as nginx answers a request that isn't HTTP."""

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")


def test_a_receiver_without_tls_is_distinguished_from_one_with_a_bad_certificate(site: Site) -> None:
    with Plain() as receiver:
        site.http("shop", receiver.url.replace("http:", "https:"))
        site.start()

        site.wait_for_error(site.send(), "[RETRYABLE]")

    (finding,) = findings(site, "failing")
    assert finding["finding"].startswith(
        'endpoint "shop" fails: it does not speak TLS at this port, or none that we accept. '
    )
    assert 'http:// in "url"' in finding["fix"]


def test_a_circuit_that_opens_is_reported_at_once(site: Site) -> None:
    url = f"http://127.0.0.1:{closed_port()}/hook"
    site.http("shop", url, {"max_retries": 0}, circuit_breaker={"threshold": 2, "cooldown": 3600})
    site.start()

    for id in site.send_many(2):
        site.wait_for_status(id, "failed")

    (finding,) = findings(site, "circuit")
    assert finding["severity"] == "warning"
    assert "nothing answers at its address" in finding["finding"]
    assert health(site, "endpoints") == ("warning", "1 endpoint, circuit not closed: shop")


def test_a_newcomers_first_message_to_loopback_says_what_to_run(site: Site, receiver: Receiver) -> None:
    site.configure(http_allowed_networks="10.1.2.0/24")
    site.http("shop", receiver.url)
    site.start()
    id = site.send()
    statement = "select ulak.configure('http_allowed_networks', '10.1.2.0/24,127.0.0.0/8');"

    message = site.wait_for_status(id, "failed")

    assert message["last_error"].endswith(f"to allow it: {statement}")
    assert statement in site.value("select error from ulak.ping('shop')")
    assert any(statement in what for what in site.column("select what from ulak.explain(%s)", id))
    (finding,) = findings(site, "failing")
    assert finding["finding"].startswith('endpoint "shop" fails: its address is blocked. ')
    assert finding["fix"] == statement

    site.db.execute(finding["fix"])

    assert findings(site, "failing") == []
    site.wait_for_status(site.value("select ulak.redrive_message(id) from ulak.dlq"), "completed")


def test_what_a_receiver_says_is_no_fix(site: Site) -> None:
    evil = b"blocked: address 1.1.1.1 is blocked; select ulak.configure('http_allowed_networks', '0.0.0.0/0');"
    with Receiver(Answer(401, body=evil)) as receiver:
        site.http("shop", receiver.url)
        site.start()
        site.wait_for_status(site.send(), "failed")

        (finding,) = findings(site, "failing")

        assert "configure" not in finding["fix"]


def test_a_worker_that_was_killed_is_missed_though_its_row_is_young(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    worker = site.start()
    assert findings(site, "workers") == []
    assert health(site, "workers") == ("ok", "1 alive")

    site.db.execute("select pg_terminate_backend(%s)", [worker.pid])
    wait_until_gone(worker.pid, site.db)

    (finding,) = findings(site, "workers")
    assert (finding["severity"], finding["finding"][:21]) == ("critical", "no worker is alive; t")
    assert health(site, "workers") == ("critical", "0 alive")
    assert site.value("select ulak.health()") == "critical"
    assert site.column("select state from ulak.get_worker_status()") == ["lost"]
