"""A receiver, or a token server, that answers with whatever could do harm."""

from __future__ import annotations

import json
import re
import ssl
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from support import hostile
from support.cluster import Cluster
from support.hostile import Hostile
from support.receiver import Answer, Certificate, Received, Receiver, make_certificate
from support.sessions import wait_until
from support.site import Site, WorkerSession

ONCE = {"max_retries": 0}
PATIENT = {"max_retries": 1, "backoff": "schedule", "schedule": [0]}
# JSON that PostgreSQL or Python can't hold, or can't read.
ANSWERS = {
    "nul": b'{"error": "a\\u0000b"}',
    "surrogate": b'{"error": "\\ud800"}',
    "long": b'{"error": "%s"}' % (b"x" * 60_000),
    "deep": b"[" * 30_000,
    "digits": b'{"access_token": "abc", "expires_in": 1%s}' % (b"0" * 400),
    "no_utf8": b'{"error": "\xff\xfe"}',
    "wide": '{"error": "日本 \U0001f4a5"}'.encode(),
}


def reported(site: Site, worker: WorkerSession, messages: int) -> None:
    """Waits until it has reported this many processed messages, and not in its last report."""
    wait_until(lambda: site.worker_row(worker)["messages_processed"] >= messages, message="a report of the worker")
    assert site.worker_row(worker)["state"] == "running"


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("answer", ANSWERS)
def test_no_token_server_can_end_a_run(site: Site, receiver: Receiver, answer: str, status: int) -> None:
    with Receiver(Answer(status, {}, ANSWERS[answer])) as token_server:
        auth = {"type": "oauth2", "token_url": token_server.url, "client_id": "c", "client_secret": "hush-secret"}
        site.http("authorised", receiver.url, PATIENT, auth=auth)
        site.http("other", receiver.url)
        worker = site.start()

        asked = site.send("authorised")
        site.wait_for_status(site.send("other"), "completed")
        site.wait_until_settled()

        row = site.message(asked)
        assert row["status"] == ("completed" if (answer, status) == ("digits", 200) else "failed")
        assert "\x00" not in (row["last_error"] or "")
        assert len(row["last_error"] or "") < 300
        site.wait_for_status(site.send("other"), "completed")
        reported(site, worker, 3)
    assert not worker.call.is_done()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_no_answer_can_end_a_run_in_a_database_that_cannot_hold_it(
    site_in: Callable[[str], Site], receiver: Receiver, encoding: str
) -> None:
    site = site_in(encoding)
    site.configure(capture_response="true")
    with Receiver(Answer(500, {"x-text": "caf\xe9"}, "日本 ü € \U0001f4a5 \x00".encode() + b"\xff")) as wide:
        site.http("wide", wide.url, ONCE)
        site.http("other", receiver.url)
        worker = site.start()

        ids = [site.send("wide") for _ in range(3)]
        site.wait_for_status(site.send("other"), "completed")
        for id in ids:
            assert site.wait_for_status(id, "failed")["last_error"].startswith("[RETRYABLE] HTTP 500: ")
            assert site.value("select response ->> 'status' from ulak.messages where id = %s", id) == "500"
        assert site.value("select error from ulak.ping('wide')").startswith("[RETRYABLE] HTTP 500: ")
        reported(site, worker, 4)
    assert not worker.call.is_done()


def test_trailers_count_like_headers(site: Site, receiver: Receiver) -> None:
    with Hostile(hostile.endless_trailers) as endless:
        site.http("endless", endless.url, ONCE)
        site.http("other", receiver.url)
        worker = site.start()

        error = site.wait_for_status(site.send("endless"), "failed")["last_error"]

        assert error == "[RETRYABLE] network: the answer's headers are too long"
        # What the kernel's buffers took counts too.
        assert endless.sent < 20_000_000
        site.wait_for_status(site.send("other"), "completed")
    assert not worker.call.is_done()


# What a monitor may ask, as one text.
SEEN_BY_A_MONITOR = """
    select concat_ws(E'\\n',
        (select string_agg(t::text, E'\\n') from ulak.event_log t),
        (select string_agg(t::text, E'\\n') from ulak.attempts t),
        (select string_agg(t::text, E'\\n') from ulak.workers t),
        (select string_agg(t::text, E'\\n') from ulak.endpoint_list t),
        (select string_agg(t::text, E'\\n') from ulak.top t),
        (select string_agg(t::text, E'\\n') from ulak.get_endpoint_health() t),
        (select string_agg(t::text, E'\\n') from ulak.get_worker_status() t),
        (select string_agg(t::text, E'\\n') from ulak.health_check() t),
        (select string_agg(t::text, E'\\n') from ulak.dlq_summary() t),
        (select string_agg(t::text, E'\\n') from ulak.doctor() t),
        (select string_agg(t::text, E'\\n') from ulak.message_status(%(id)s) t),
        (select string_agg(t::text, E'\\n') from ulak.explain(%(id)s) t),
        (select string_agg(t::text, E'\\n') from ulak.history(%(id)s) t),
        ulak.report()
    )
"""
AUTHS: dict[str, dict[str, Any]] = {
    "bearer": {"type": "bearer", "token": {"$secret": "token"}},
    "basic": {"type": "basic", "username": "ada", "password": {"$secret": "token"}},
    "sigv4": {
        "type": "aws_sigv4",
        "access_key": "hush-access-key",
        "secret_key": {"$secret": "token"},
        "region": "eu-central-1",
        "service": "events",
        "session_token": "hush-session",
    },
    "oauth2": {"type": "oauth2", "client_id": "ada", "client_secret": {"$secret": "token"}},
}


@pytest.mark.parametrize("auth", AUTHS)
def test_what_a_receiver_echoes_of_secrets_and_payload_reaches_no_monitor(
    site: Site, cluster: Cluster, echo: Receiver, auth: str
) -> None:
    logged_before = cluster.log.stat().st_size
    site.call("set_secret", "token", "hush-token/1?")
    site.call("set_secret", "own", 'hush-own "2"')
    token = json.dumps({"access_token": "hush-fetched-token", "expires_in": 60}).encode()
    with Receiver(Answer(200, {}, token)) as token_server:
        chosen = AUTHS[auth] | ({"token_url": token_server.url} if auth == "oauth2" else {})
        site.http(
            "shop",
            echo.origin + "/hush-path-3/hook?key=hush-4",
            ONCE,
            auth=chosen,
            headers={"x-own": {"$secret": "own"}},
            signing_secret="hush-signing-5",
        )
        id = site.send("shop", {"name": "payload-6", "pin": 7340173401734, "nested": [{"mail": "payload@example.com"}]})
        worker = site.start()
        row = site.wait_for_status(id, "failed")
        site.wait_for_status(id, "failed")
    worker.end()

    with site.connect("ulak_monitor") as monitor:
        (seen,) = monitor.execute(SEEN_BY_A_MONITOR, {"id": id}).fetchone() or [""]
    (request,) = echo.requests
    log = cluster.log.read_bytes()[logged_before:].decode(errors="replace")
    told = f"{row['last_error']} {seen} {log}"

    assert "[PERMANENT] HTTP 422: Cannot POST ****" in seen
    assert re.findall(r".{,40}hush.{,10}", told) == []
    assert "payload" not in row["last_error"]
    assert "7340173401734" not in row["last_error"]
    for name in ("authorization", "webhook-signature"):
        for part in request.headers[name].replace(",", " ").split():
            assert len(part) < 16 or part == "AWS4-HMAC-SHA256" or part not in told


@pytest.mark.parametrize("capture", ["false", "true"])
def test_no_answer_makes_a_report_that_cannot_be_read(site: Site, receiver: Receiver, capture: str) -> None:
    """The console parses it as XML."""
    receiver.answer = Answer(422, {"x-told": "a"}, "no\uffff \ufffe \x0b\x1b[31m\u202e \U0001ffff such order".encode())
    site.configure(capture_response=capture)
    site.http("shop", receiver.url, ONCE)
    id = site.send("shop")
    site.start()

    error = site.wait_for_status(id, "failed")["last_error"]

    assert error == "[PERMANENT] HTTP 422: no [31m such order"
    ElementTree.fromstring(site.value("select ulak.report()").split("\n", 1)[1])


def test_a_stored_text_that_xml_cannot_hold_makes_a_report_that_can_be_read(site: Site) -> None:
    """As an earlier version has stored it."""
    site.endpoint("shop")
    site.bury(site.send("shop"))
    site.db.execute("update ulak.dlq set last_error = E'[RETRYABLE] odd \\uFFFF text', failed_at = now()")

    root = ElementTree.fromstring(site.value("select ulak.report()").split("\n", 1)[1])

    assert "odd \ufffd text" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("Cannot POST {path}", "Cannot POST ****"),
        ("no lovelace, ada as countess%20lovelace", "no lovelace, **** as ****"),
        # Two or three characters only as a whole word.
        (
            "ada of the EU, not of Canada or EUROPE, has no 4711, DE89, QDE89Q",
            "**** of the ****, not of Canada or EUROPE, has no ****, ****, Q****Q",
        ),
    ],
)
def test_what_a_receiver_echoes_of_a_messages_path_reaches_no_monitor(site: Site, answer: str, told: str) -> None:
    def echo(request: Received) -> Answer:
        return Answer(422, {}, answer.format(path=request.path).encode())

    with Receiver(echo) as receiver:
        site.http("shop", receiver.url, ONCE)
        path = "ada/countess%20lovelace/4711?iban=DE89&q=EU"
        id = site.value("select ulak.send('shop', '{}', p_path => %s)", path)
        site.start()

        error = site.wait_for_status(id, "failed")["last_error"]

    assert error == f"[PERMANENT] HTTP 422: {told}"


def test_what_a_receiver_decodes_of_a_messages_path_reaches_no_monitor(site: Site) -> None:
    """It is masked in the answer as it came: in the line that is kept, the two blanks are one."""

    def unknown(request: Received) -> Answer:
        return Answer(404, {}, f"nobody is {unquote(request.path.rpartition('/')[2])}".encode())

    with Receiver(unknown) as receiver:
        site.http("shop", receiver.origin, ONCE)
        id = site.value("select ulak.send('shop', '{}', p_path => 'customers/ada%20%20lovelace')")
        site.start()

        error = site.wait_for_status(id, "failed")["last_error"]

    assert error == "[PERMANENT] HTTP 404: nobody is ****"


@pytest.mark.parametrize("credentials", ["header", "body"])
def test_a_token_server_that_echoes_gives_no_secret_away(site: Site, receiver: Receiver, credentials: str) -> None:
    def echo(request: Received) -> Answer:
        told = f"refused: {request.headers.get('authorization')} {request.body.decode()}"
        return Answer(400, {}, json.dumps({"error": told}).encode())

    with Receiver(echo) as token_server:
        auth = {"type": "oauth2", "client_id": "ada", "client_secret": "hush/secret+1?", "token_url": token_server.url}
        site.http("shop", receiver.url, ONCE, auth={**auth, "credentials": credentials})
        site.start()

        error = site.wait_for_status(site.send("shop"), "failed")["last_error"]

        (request,) = token_server.requests
    assert error.startswith("[RETRYABLE] OAuth2 token request: HTTP 400: refused: ")
    assert "hush" not in error
    assert request.headers.get("authorization", "Basic none sent").split()[1] not in error


def test_an_error_that_names_a_field_stays_readable(site: Site) -> None:
    body = b'{"errors": [{"field": "mail", "problem": "ada@example.com is not a valid address"}]}'
    with Receiver(Answer(422, {}, body)) as picky:
        site.http("shop", picky.url)
        site.start()

        error = site.wait_for_status(site.send("shop", {"mail": "ada@example.com", "valid": True}), "failed")[
            "last_error"
        ]

    assert error == ('[PERMANENT] HTTP 422: {"errors": [{"field": "mail", "problem": "**** is not a valid address"}]}')


def odd_certificate(folder: Path) -> Certificate:
    """For another host, by a name that isn't UTF-8. Its signature is void by that, but it is its own authority."""
    made = make_certificate(folder, names=("odd.name",), file="odd")
    raw = ssl.PEM_cert_to_DER_cert(made.certificate.read_text())
    # From a UTF8String to a TeletexString, which may hold any bytes.
    raw = raw.replace(b"\x0c\x08odd.name", b"\x14\x08\xff\xfe\xe9\x80\x1b[1m")
    made.certificate.write_text(ssl.DER_cert_to_PEM_cert(raw))
    return made


def test_a_certificate_of_any_text_cannot_end_a_run(site: Site, receiver: Receiver, tmp_path: Path) -> None:
    odd = odd_certificate(tmp_path)
    with Receiver(certificate=odd) as secure:
        site.http("odd", secure.url, ONCE, tls_ca_bundle=str(odd.certificate))
        site.http("other", receiver.url)
        worker = site.start()

        error = site.wait_for_status(site.send("odd"), "failed")["last_error"]

        assert error.startswith("[RETRYABLE] tls: ")
        site.wait_for_status(site.send("other"), "completed")
    assert not worker.call.is_done()
