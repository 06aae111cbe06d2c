"""From ulak.send() to the receiver: config, SQL and Python fit together. The details have unit tests of their own."""

from __future__ import annotations

import base64
import hmac
import json
import ssl
from typing import Any
from uuid import UUID

import psycopg
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from support.hostile import Hostile, never_answers
from support.http2 import Http2Receiver
from support.receiver import Answer, Certificate, Received, Receiver
from support.sessions import Running, wait_until
from support.site import LONGEST_TIMEOUT, Site
from support.webhooks import verifies

CORRELATION = "11111111-2222-3333-4444-555555555555"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_request_carries_what_endpoint_and_message_say_in_their_rank(site: Site, receiver: Receiver) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        headers = {"X-Shop": "endpoint", "X-Kept": "endpoint", "User-Agent": "mine"}
        site.http(method, receiver.url, method=method, headers=headers)
    site.start()
    own = {"x-shop": "message", "traceparent": TRACE}

    for method in ("POST", "PUT", "PATCH", "DELETE"):
        id = site.send(method, {"name": "Çiğdem"}, headers=own, correlation_id=CORRELATION, generation=7)
        message = site.wait_for_status(id, "completed")
        got = receiver.requests[-1]

        assert (got.method, got.path, json.loads(got.body)) == (method, "/hook", {"name": "Çiğdem"})
        assert got.headers["x-shop"] == "message"
        assert got.headers["x-kept"] == "endpoint"
        assert got.headers["user-agent"] == "mine"
        span = site.value("select span_id from ulak.history(%s)", id)
        assert got.headers["traceparent"] == f"{TRACE[:36]}{span}{TRACE[-3:]}" != TRACE
        assert got.headers["content-type"] == "application/json"
        assert got.headers["x-correlation-id"] == CORRELATION
        assert got.headers["ulak-generation"] == "7"
        assert UUID(got.headers["webhook-id"]) == message["message_id"]
        assert got.headers["ulak-attempt"] == "1"
        assert got.headers["host"] == receiver.url.split("/")[2]
        assert "expect" not in got.headers
    assert {request.connection for request in receiver.requests} == {1}


def test_signatures_verify_and_a_rotation_signs_with_both_secrets(site: Site, receiver: Receiver) -> None:
    first = "whsec_" + base64.b64encode(b"the first secret of this test...").decode()
    site.http("shop", receiver.url, signing_secret=first)
    site.start()
    site.wait_for_status(site.send(), "completed")
    second = site.call("rotate_secret", "shop", grace="1 hour")
    site.wait_for_status(site.send(), "completed")
    third = site.call("rotate_secret", "shop", grace="0 s")
    site.wait_for_status(site.send(), "completed")

    verified = [
        [secret for secret in (first, second, third) if verifies(secret, request)] for request in receiver.requests
    ]

    assert verified == [[first], [first, second], [third]]


def test_events_are_read_by_an_independent_implementation(site: Site, receiver: Receiver) -> None:
    site.configure(cloudevents_source="/shop")
    for mode in ("structured", "binary"):
        site.http(mode, receiver.url, cloudevents=True, cloudevents_mode=mode, cloudevents_type="order.created")
    site.http("batch", receiver.url, cloudevents=True, batch_size=10, batch_format="cloudevents")
    site.start()

    for mode in ("structured", "binary"):
        id = site.send(mode, {"n": 1}, ordering_key="customer 5", correlation_id=CORRELATION)
        message = site.wait_for_status(id, "completed")
        got = receiver.requests[-1]
        event: Any = from_http_event(HTTPMessage(got.headers, got.body))
        data = event.get_data()
        assert (data if isinstance(data, dict) else json.loads(data)) == {"n": 1}
        assert UUID(event.get_id()) == message["message_id"]
        assert (event.get_type(), event.get_source()) == ("order.created", "/shop")
        assert event.get_time() == message["created_at"]
        assert event.get_extension("partitionkey") == "customer 5"
        assert event.get_extension("correlationid") == CORRELATION

    site.send_many(3, "batch")
    site.wait_until_settled()
    got = receiver.requests[-1]
    assert got.headers["content-type"] == "application/cloudevents-batch+json"
    for n, part in enumerate(json.loads(got.body), start=1):
        event = from_http_event(
            HTTPMessage({"content-type": "application/cloudevents+json"}, json.dumps(part).encode())
        )
        assert event.get_data() == {"n": n}


def test_credentials_of_every_kind_reach_the_receiver(site: Site) -> None:
    tokens: list[str] = []

    def answer(request: Received) -> Answer:
        if request.path == "/token":
            assert request.headers["authorization"] == "Basic " + base64.b64encode(b"me:s3cret").decode()
            assert b"scope=orders" in request.body
            tokens.append(f"token-{len(tokens) + 1}")
            return Answer(body=json.dumps({"access_token": tokens[-1], "expires_in": 3600}).encode())
        # The first token is revoked after two requests.
        used = sum(each.headers.get("authorization") == "Bearer token-1" for each in receiver.requests)
        return Answer(401 if request.headers.get("authorization") == "Bearer token-1" and used > 2 else 200)

    with Receiver(answer) as receiver:
        site.call("set_secret", "client", "s3cret")
        auths: dict[str, dict[str, Any]] = {
            "basic": {"username": "me", "password": "pässword"},
            "bearer": {"token": "the token"},
            "oauth2": {
                "token_url": receiver.origin + "/token",
                "client_id": "me",
                "client_secret": {"$secret": "client"},
                "scope": "orders",
            },
            "aws_sigv4": {"access_key": "AKID", "secret_key": "secret", "region": "eu-central-1", "service": "lambda"},
        }
        for kind, fields in auths.items():
            site.http(kind, receiver.url, auth={"type": kind, **fields})
        site.start()
        used: dict[str, list[str]] = {}
        for kind in auths:
            for _ in range(3 if kind == "oauth2" else 1):
                site.wait_for_status(site.send(kind), "completed")
            used[kind] = [each.headers["authorization"] for each in receiver.requests if each.path == "/hook"]
            receiver.requests.clear()

    assert used["basic"] == ["Basic " + base64.b64encode("me:pässword".encode()).decode()]
    assert used["bearer"] == ["Bearer the token"]
    assert used["oauth2"] == ["Bearer token-1"] * 3 + ["Bearer token-2"]
    (signed,) = used["aws_sigv4"]
    assert signed.startswith("AWS4-HMAC-SHA256 Credential=AKID/")
    assert "/eu-central-1/lambda/aws4_request" in signed
    assert tokens == ["token-1", "token-2"]


def demands_certificate(certificate: Certificate) -> Receiver:
    receiver = Receiver(certificate=certificate)
    assert receiver._context is not None
    receiver._context.verify_mode = ssl.CERT_REQUIRED
    receiver._context.load_verify_locations(certificate.certificate)
    return receiver


def test_tls_is_verified_unless_the_config_says_otherwise(site: Site, certificate: Certificate) -> None:
    once = {"max_retries": 0}
    ca = str(certificate.certificate)
    plain, demanding, second = (
        Receiver(certificate=certificate),
        demands_certificate(certificate),
        Http2Receiver(certificate),
    )
    with plain, demanding, second:
        site.http("untrusted", plain.url, once)
        site.http("unverified", plain.url, once, ssl_verify=False)
        site.http("trusted", plain.url, once, tls_ca_bundle=ca)
        key = str(certificate.key)
        site.http("client", demanding.url, once, tls_ca_bundle=ca, tls_client_cert=ca, tls_client_key=key)
        site.http("stranger", demanding.url, once, tls_ca_bundle=ca)
        site.http("pinned", plain.url, once, tls_ca_bundle=ca, tls_pinned_public_key="sha256//" + "A" * 43 + "=")
        site.http("http2", second.url, once, tls_ca_bundle=ca)
        site.start()

        sent = {name: site.send(name) for name in site.column("select name from ulak.endpoints")}
        site.wait_until_settled()

        statuses = {name: site.status(id) for name, id in sent.items()}
        assert statuses == {
            "untrusted": "failed",
            "unverified": "completed",
            "trusted": "completed",
            "client": "completed",
            "stranger": "failed",
            "pinned": "failed",
            "http2": "completed",
        }
        assert site.message(sent["untrusted"])["last_error"].startswith("[RETRYABLE] tls: ")
        assert (len(plain.requests), len(demanding.requests)) == (2, 1)
        assert second.bodies == [b'{"n": 1}']


def test_a_proxy_is_used_only_if_the_config_names_one(site: Site, receiver: Receiver) -> None:
    with Receiver() as proxy:
        site.http("direct", receiver.url)
        site.http("proxied", "http://192.0.2.1/hook", proxy={"url": proxy.origin, "username": "me", "password": "pw"})
        site.configure(http_allowed_networks="127.0.0.0/8")
        site.start()
        for name in ("direct", "proxied"):
            site.wait_for_status(site.send(name), "completed")

        (through,) = proxy.requests

    assert through.path == "http://192.0.2.1/hook"
    assert through.headers["proxy-authorization"] == "Basic " + base64.b64encode(b"me:pw").decode()
    assert len(receiver.requests) == 1


def test_answers_are_judged_by_status_and_config(site: Site) -> None:
    def answer(request: Received) -> Answer:
        headers = {"retry-after": "120"} if request.path == "/later" else {}
        return Answer(int(json.loads(request.body)["status"]), headers, b"because")

    with Receiver(answer) as receiver:
        later = receiver.origin + "/later"
        site.http("plain", receiver.url, {"backoff": "fixed", "base_delay_seconds": 3600})
        site.http("later", later, {"backoff": "fixed", "base_delay_seconds": 3600})
        site.http("own", receiver.url, {"base_delay_seconds": 3600}, retry_on=[404], permanent_on=["5xx"])
        site.http("gone", receiver.url, auto_disable_on_gone=True)
        site.start()

        def outcome(endpoint: str, status: int) -> tuple[str, str]:
            id = site.send(endpoint, {"status": status})
            message = wait_until(lambda: (m := site.message(id)) and (m["completed_at"] or m["last_error"]) and m)
            return message["status"], (message["last_error"] or "").partition(":")[0]

        assert outcome("plain", 200) == ("completed", "")
        assert outcome("plain", 204) == ("completed", "")
        assert outcome("plain", 302) == ("failed", "[PERMANENT] HTTP 302")
        assert outcome("plain", 404) == ("failed", "[PERMANENT] HTTP 404")
        assert outcome("plain", 408) == ("pending", "[RETRYABLE] HTTP 408")
        assert outcome("plain", 500) == ("pending", "[RETRYABLE] HTTP 500")
        assert outcome("later", 429) == ("pending", "[RETRYABLE] HTTP 429")
        assert outcome("later", 503) == ("pending", "[RETRYABLE] HTTP 503")
        assert outcome("own", 404) == ("pending", "[RETRYABLE] HTTP 404")
        assert outcome("own", 503) == ("failed", "[PERMANENT] HTTP 503")
        assert outcome("plain", 410) == ("failed", "[DISABLE] HTTP 410")
        assert outcome("gone", 410) == ("failed", "[DISABLE] HTTP 410")

    delays = """
        select e.name, array_agg(distinct round(extract(epoch from q.next_retry_at - q.updated_at))::integer)
        from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
        where q.status = 'pending' and e.name in ('plain', 'later') group by 1 order by 1
    """
    assert site.db.execute(delays).fetchall() == [("later", [120]), ("plain", [3600])]
    assert site.column("select name from ulak.endpoints where not enabled") == ["gone"]


def test_a_captured_response_holds_no_secret_and_is_cut(site: Site) -> None:
    headers = {"x-shop": "yes", "set-cookie": "s=1", "authorization": "leak", "webhook-signature": "leak"}
    site.configure(capture_response="true", response_body_max_size=10)
    with Receiver(Answer(200, headers, b"0123456789abcdef")) as receiver:
        site.http("shop", receiver.url)
        site.start()

        response = site.wait_for_status(site.send(), "completed")["response"]

    assert (response["status"], response["body"], response["truncated"]) == (200, "0123456789", True)
    assert response["headers"] == {"content-length": "16", "x-shop": "yes"}
    assert response["total_ms"] >= response["first_byte_ms"] > 0


def test_internal_addresses_are_blocked_for_receivers_tokens_and_proxies(site: Site, receiver: Receiver) -> None:
    site.configure(http_allowed_networks="10.0.0.0/8")
    token = {"type": "oauth2", "token_url": receiver.url, "client_id": "me", "client_secret": "s"}
    site.http("receiver", receiver.on("localhost"))
    site.http("token", "https://192.0.2.1/", auth=token)
    site.http("proxy", "https://192.0.2.1/", proxy={"url": receiver.origin})
    site.start()

    for name in ("receiver", "token", "proxy"):
        message = site.wait_for_status(site.send(name), "failed")
        assert message["last_error"].startswith("[PERMANENT] ")
        assert "is blocked (loopback, " in message["last_error"]
    assert receiver.connections == 0


def test_ping_sends_one_signed_request_and_leaves_no_trace(site: Site, certificate: Certificate) -> None:
    secret = "whsec_" + base64.b64encode(b"a secret for the ping").decode()
    with Receiver(Answer(201, body=b"welcome")) as receiver:
        site.http("shop", receiver.url, signing_secret=secret)
        site.http("down", "http://127.0.0.1:9/", circuit_breaker={"threshold": 1})
        with site.connect("ulak_admin") as administrator:
            fine = administrator.execute("select * from ulak.ping('shop')").fetchone()
            down = administrator.execute("select * from ulak.ping('down')").fetchone()
        (request,) = receiver.requests

    assert fine is not None and down is not None
    assert (fine[0], fine[1], fine[3], fine[4]["body"]) == ("delivered", 201, None, "welcome")
    assert (down[0], down[1]) == ("failed", None) and down[3].startswith("[RETRYABLE] connect")
    assert verifies(secret, request)
    assert site.value("select count(*) from ulak.queue") == 0
    assert site.column("select circuit_failure_count from ulak.endpoints") == [0, 0]
    assert site.column("select coalesce(last_success_at, last_failure_at) from ulak.endpoints") == [None, None]


def test_a_ping_that_hangs_can_be_cancelled(site: Site) -> None:
    with Hostile(never_answers) as hanging, site.connect() as session:
        site.http("hanging", hanging.url, timeout=LONGEST_TIMEOUT)
        ping = Running(lambda: session.execute("select * from ulak.ping('hanging')"))
        wait_until(lambda: hanging.connections)

        session.cancel()

        with pytest.raises(psycopg.errors.QueryCanceled):
            ping.result()


def test_raw_bodies_paths_time_outs_and_signatures_reach_the_receiver(site: Site, receiver: Receiver) -> None:
    secret = "a secret of this test"
    site.http("shop", receiver.url, signing_secret=secret, signature={"scheme": "github"})
    site.start()
    raw = '{ "b": 1,  "a": "Ç" }\r\n'

    id = site.value("select ulak.send('shop', p_raw => %s, p_content_type => 'text/x', p_path => 'a/b?c=1')", raw)
    site.wait_for_status(id, "completed")

    (got,) = receiver.requests
    assert (got.path, got.body, got.headers["content-type"]) == ("/hook/a/b?c=1", raw.encode(), "text/x")
    made = hmac.new(secret.encode(), raw.encode(), "sha256").hexdigest()
    assert got.headers["x-hub-signature-256"] == f"sha256={made}"


def test_a_messages_own_time_out_ends_its_request(site: Site) -> None:
    with Hostile(never_answers) as hanging:
        site.http("shop", hanging.url, policy={"max_retries": 0}, timeout=LONGEST_TIMEOUT)
        site.start()

        id = site.value("select ulak.send('shop', '1', p_timeout => 0.2)")

        assert "its own time-out" in site.wait_for_status(id, "failed")["last_error"]


def test_an_event_has_one_id_at_two_endpoints_of_one_receiver(site: Site, receiver: Receiver) -> None:
    site.call("create_event_type", "sold")
    for name in ("a", "b"):
        site.http(name, receiver.url, cloudevents=True)
        site.call("subscribe", "sold", name)
    site.start()

    site.value("select ulak.publish('sold', '1')")
    site.wait_until_settled()
    site.call("drop_event_type", "sold")

    assert len({each.headers["ce-id"] for each in receiver.requests}) == 1
    assert len({each.headers["ulak-event-id"] for each in receiver.requests}) == 1
    assert len({each.headers["webhook-id"] for each in receiver.requests}) == 2
