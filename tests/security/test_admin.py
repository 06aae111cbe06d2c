"""What an administrator must not be able to do: skip validation, stop every worker by a setting, or date the log."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Cluster, Connect
from support.errors import refused
from support.receiver import Answer, Certificate, Received, Receiver
from support.site import Site

DB = psycopg.Connection[Any]
LONG_AGO = "2000-01-01"
FILE_PROBLEM = (
    "[RETRYABLE] config: a file that the config names can't be used: each must be a regular file of at most 1 MB,"
    " in PEM format, that the server may read"
)
ONCE = {"max_retries": 0}
HEADER = {"headers": {"x-key": {"$secret": "bound"}}}
KEYS = ("tls_ca_bundle", "tls_client_cert", "tls_client_key", "tls_pinned_public_key", "proxy")
SECRETS = {
    "header": "hush-header-value",
    "url": "http://hush-host.example.com/hush-path?hush=1",
    "proxy": "http://hush-proxy.example.com:3128",
    "user": "hush-user",
    "password": "hush-password",
    "token": "hush-token",
    "signing": "hush-signing-secret",
    "type": "hush-type",
}


@pytest.fixture
def admin(connect: Connect) -> DB:
    return connect("ulak_admin")


def test_it_cannot_skip_the_validation_of_a_config_as_a_restore_does(db: DB, admin: DB) -> None:
    admin.execute("set row_security = off")

    denied = refused(admin, """select ulak.create_endpoint('e', 'pull', '{}', '{"max_retries": "many"}')""")
    assert denied.sqlstate == "22023"
    admin.execute("select ulak.create_endpoint('e', 'pull', '{}')")

    assert db.execute("select event, actor from ulak.event_log").fetchall() == [("endpoint.created", "test_ulak_admin")]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("10.1/16", "10.1.0.0/16"),
        (" 10 , 192.168.5 ", "10.0.0.0/8,192.168.5.0/24"),
        ("127.0.0.1", "127.0.0.1/32"),
        ("FD00::/8", "fd00::/8"),
        ("", ""),
    ],
)
def test_networks_are_stored_as_workers_read_them(db: DB, admin: DB, given: str, stored: str) -> None:
    assert admin.execute("select ulak.configure('http_allowed_networks', %s)", [given]).fetchone() == (stored,)


@pytest.mark.parametrize(
    "given", ["10.1.2.3/16", "10.0.0.0/8,", "garbage", "10.0.0.0/8;11.0.0.0/8", "1 0.0.0.0/8", "fe80::1%eth0"]
)
def test_networks_that_workers_couldnt_read_are_refused(admin: DB, given: str) -> None:
    assert refused(admin, "select ulak.configure('http_allowed_networks', %s)", given).sqlstate == "22023"


@pytest.mark.parametrize("stored", ["127/8", "127.0.0.0/8,10.1/16,garbage"])
def test_networks_of_any_spelling_end_no_run(cluster: Cluster, database: str, receiver: Receiver, stored: str) -> None:
    """Whatever lies in the table: what can be read counts."""
    site = Site(cluster, database)
    if "garbage" in stored:
        site.db.execute("update ulak.setting_values set value = %s where name = 'http_allowed_networks'", [stored])
    else:
        site.configure(http_allowed_networks=stored)
    site.http("shop", receiver.url)
    id = site.send()

    site.start()

    site.wait_for_status(id, "completed")
    site.close()


def test_no_host_is_dialled_that_is_not_allowed(site: Site, receiver: Receiver) -> None:
    """Whatever lies in the tables: receiver, token server and proxy are judged when they are dialled, too."""
    port = receiver.port
    elsewhere = f"http://127.0.0.1:{port}"
    oauth = {"type": "oauth2", "token_url": elsewhere, "client_id": "a", "client_secret": "b"}
    site.configure(http_allowed_hosts="localhost")
    for name, config in {
        "good": {},
        "url": {"url": elsewhere},
        "proxy": {"proxy": {"url": elsewhere}},
        "token": {"auth": oauth},
    }.items():
        site.http(name, f"http://localhost:{port}")
        # As if the list had been longer when it was written.
        site.db.execute("alter table ulak.endpoints disable trigger user")
        site.db.execute(
            "update ulak.endpoints set config = config || %s, config_version = 2 where name = %s", [Jsonb(config), name]
        )
        site.db.execute("alter table ulak.endpoints enable trigger user")
    ids = {name: site.send(name) for name in ("url", "proxy", "token")}
    good = site.send("good")

    site.start()

    for name, id in ids.items():
        told = site.wait_for_error(id, "is not listed in http_allowed_hosts")
        assert told.startswith("[RETRYABLE] "), name
        assert "host 127.0.0.1 is not listed" in told
    assert site.call("ping", "url") is not None
    site.wait_for_status(good, "completed")
    assert len(receiver.requests) == 1


BOUND = {"$secret": "bound"}


def test_it_has_no_bound_secret_sent_to_a_host_of_its_own(site: Site, receiver: Receiver) -> None:
    """Every way that a config could name, and every way past the config."""
    with site.connect() as owner:
        owner.execute("select ulak.set_secret('bound', 'hush-hush-hush', p_hosts => '{localhost,id.example.com}')")
    home, own = f"http://localhost:{receiver.port}/home", f"http://127.0.0.1:{receiver.port}/own"
    oauth = {"type": "oauth2", "client_id": "me", "client_secret": BOUND}
    attacks: list[dict[str, Any]] = [
        {"url": own, "headers": {"x-key": BOUND}},
        {"url": own, "auth": {"type": "bearer", "token": BOUND}},
        {"url": own, "auth": {"type": "basic", "username": "me", "password": BOUND}},
        {"url": own, "signing_secret": BOUND},
        {"url": home, "headers": {"x-key": BOUND}, "proxy": {"url": own}},
        {"url": home, "headers": {"x-key": BOUND}, "proxy": {"url": own, "no_proxy": "*"}},
        {"url": home, "proxy": {"url": own, "username": "me", "password": BOUND}},
        {"url": home, "auth": {**oauth, "token_url": own}},
        # The token would come here.
        {"url": own, "auth": {**oauth, "token_url": "http://id.example.com/"}},
        {"url": f"http://LOCALHOST.evil.test:{receiver.port}/", "headers": {"x-key": BOUND}},
        {"url": f"http://evil.test:{receiver.port}/localhost", "headers": {"x-key": BOUND}},
    ]
    with site.connect("ulak_admin") as admin:
        admin.autocommit = True
        for config in attacks:
            denied = refused(admin, "select ulak.create_endpoint('new', 'http', %s)", Jsonb(config))
            assert "which is bound to other hosts" in str(denied.message_primary)
            assert "hush" not in str(denied.message_hint)
        admin.execute("select ulak.create_endpoint('shop', 'http', %s)", [Jsonb({"url": home, **HEADER})])
        for statement in (
            "select ulak.alter_endpoint('shop', config || '{\"url\": \"http://127.0.0.1/\"}') from ulak.endpoints",
            'update ulak.endpoints set config = config || \'{"url": "http://127.0.0.1/"}\'',
            "select ulak.set_secret('bound', '', p_hosts => '{127.0.0.1}')",
            "select ulak.set_secret('bound', null, p_hosts => '{127.0.0.1}')",
            "update ulak_private.secrets set hosts = null",
            "select ulak_private.endpoint_configs('{1}')",
        ):
            assert refused(admin, statement).sqlstate in ("22023", "42501")
        admin.execute(
            "select ulak.configure('require_bound_secrets', 'false'), ulak.configure('http_allowed_hosts', '')"
        )
        # A path of the message's own stays behind the host.
        ids = [site.send("shop"), site.send("shop", path="@127.0.0.1/own")]
        site.start()
        for id in ids:
            site.wait_for_status(id, "completed")

    assert {each.headers["host"] for each in receiver.requests} == {f"localhost:{receiver.port}"}
    assert all(each.headers["x-key"] == "hush-hush-hush" for each in receiver.requests)


def test_a_redirect_carries_no_secret_to_another_host(site: Site, receiver: Receiver) -> None:
    site.db.execute("select ulak.set_secret('bound', 'hush-hush-hush', p_hosts => '{localhost}')")
    answer = Answer(307, {"location": f"http://127.0.0.1:{receiver.port}/own"})
    with Receiver(lambda request: answer) as redirecting:
        site.http("shop", f"http://localhost:{redirecting.port}/", ONCE, **HEADER)
        id = site.send("shop")
        site.start()
        site.wait_for_status(id, "failed")

    assert len(redirecting.requests) == 1
    assert receiver.requests == []


def test_a_document_does_no_more_than_the_single_functions_would(site: Site, receiver: Receiver) -> None:
    site.db.execute("select ulak.set_secret('bound', 'hush-hush-hush', p_hosts => '{localhost}')")
    site.http("shop", f"http://localhost:{receiver.port}/", auth={"type": "bearer", "token": "hush-literal-token"})
    evil = {"protocol": "http", "config": {"url": receiver.url, **HEADER}}
    shop = {"protocol": "http", "config": {"url": f"http://localhost:{receiver.port}/", "headers": {"x": "***"}}}
    with site.connect("ulak_admin") as admin:
        admin.autocommit = True
        admin.execute("set row_security = off")
        for document in (
            {"endpoints": {"evil": evil}},
            {"endpoints": {"shop": evil}},
            {"endpoints": {"evil": {"protocol": "log", "config": {"max_bytes": -1}}}},
            {"endpoints": {"it's": {"protocol": "pull'; drop table orders; --"}}},
            {"settings": {"search_path'; select 1; --": "x"}},
            {"event_types": {"ulak.message.dead": {}}},
            {"grants": [{"role": "nobody-knows", "endpoint": "shop", "right": "send"}]},
            {"subscriptions": [{"event_type": "x'); drop table orders; --", "endpoint": "shop"}]},
            {"secrets": {"bound": {"hosts": []}}},
        ):
            assert refused(admin, "select * from ulak.apply(%s)", Jsonb(document)).sqlstate == "22023"
        row = admin.execute("select ulak.config()::text").fetchone()
        shown = admin.execute("select r::text from ulak.apply(%s, true) r", [Jsonb({"endpoints": {"shop": shop}})])

        assert row is not None and "hush" not in row[0]
        assert "hush" not in str(shown.fetchall())
    for role in ("ulak_application", "ulak_consumer", "ulak_monitor", "ulak_worker", "ulak_node"):
        with site.connect(role) as other:
            assert refused(other, "select * from ulak.apply('{}')").sqlstate == "42501"
            other.rollback()
            assert refused(other, "select ulak.config()").sqlstate == "42501"
    assert receiver.requests == []


def test_a_document_watches_no_table_that_its_caller_could_not_watch(db: DB, admin: DB) -> None:
    db.execute("create table public.private (id int primary key, salary int)")
    document = {
        "event_types": {"salary.changed": {}},
        "watches": [{"table": "public.private", "event_type": "salary.changed"}],
    }

    nothing = refused(admin, "select * from ulak.apply(%s)", Jsonb(document))
    db.execute("grant select on public.private to test_ulak_admin")
    reader = refused(admin, "select * from ulak.apply(%s)", Jsonb(document))
    db.execute("revoke select on public.private from test_ulak_admin")
    db.execute("grant trigger on public.private to test_ulak_admin")
    blind = refused(admin, "select * from ulak.apply(%s)", Jsonb(document))
    db.execute("select ulak.create_event_type('salary.changed'), ulak.watch('public.private', 'salary.changed')")
    admin.execute("select * from ulak.apply('{\"watches\": []}', p_prune => true)")

    assert "may not be read by" in str(nothing.message_detail)
    assert "permission denied for table private" in str(reader.message_detail)
    assert "may not be read by" in str(blind.message_detail)
    # As unwatch() does: the triggers are the owner's, and do nothing.
    triggers = "select count(*) from pg_trigger where tgrelid = 'public.private'::regclass"
    assert db.execute(triggers).fetchone() == (3,)
    assert db.execute("select count(*) from ulak.watches").fetchone() == (0,)


def test_the_part_of_apply_with_the_owners_rights_applies_all_of_a_document_or_nothing(db: DB, admin: DB) -> None:
    document = {"settings": {"batch_size": 77}, "endpoints": {"bad": {"protocol": "http", "config": {}}}}

    assert refused(admin, "select ulak_private.apply_config(%s, false)", Jsonb(document)).sqlstate == "22023"

    assert db.execute("select count(*) from ulak.setting_values where name = 'batch_size'").fetchone() == (0,)


def test_whatever_lies_in_the_tables_a_bound_secret_stays_home(site: Site, receiver: Receiver) -> None:
    site.db.execute("select ulak.set_secret('bound', 'hush-hush-hush', p_hosts => '{localhost}')")
    site.http("shop", f"http://localhost:{receiver.port}/", **HEADER)
    config = Jsonb({"url": receiver.url, **HEADER})
    site.db.execute("alter table ulak.endpoints disable trigger user")
    site.db.execute("update ulak.endpoints set config = %s, config_version = 2", [config])
    site.db.execute("alter table ulak.endpoints enable trigger user")
    id = site.send("shop")

    site.start()
    told = site.wait_for_error(id, "config")
    pinged = site.rows("select outcome, error from ulak.ping('shop')")

    assert told == '[RETRYABLE] config: secret "bound" is bound to other hosts'
    assert pinged == [{"outcome": "failed", "error": '[PERMANENT] config: secret "bound" is bound to other hosts'}]
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("event", "statement"),
    [
        ("endpoint.disabled", "select ulak.disable_endpoint('shop', %s)"),
        ("endpoint.enabled", "select ulak.enable_endpoint('off', null, %s)"),
        ("circuit.reset", "select ulak.reset_circuit_breaker('shop', %s)"),
        ("message.dead", "select ulak.archive_single_to_dlq(1, 'spam', %s)"),
        (
            "message.dead",
            "select ulak.fail(id, 'w', attempt, 'no', p_permanent => true, p_now => %s) from ulak.claim('w')",
        ),
        ("message.redriven", "select ulak.redrive_message(1, 'me', %s)"),
        ("circuit.opened", "select ulak.update_circuit_breaker(1, false, %s) from generate_series(1, 10)"),
    ],
)
def test_it_cannot_date_an_entry_of_the_log(db: DB, admin: DB, event: str, statement: str) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_endpoint('off', 'pull', '{}')")
    db.execute("select ulak.disable_endpoint('off')")
    if event == "circuit.reset":
        db.execute("select ulak.update_circuit_breaker(1, false) from generate_series(1, 10)")
    db.execute("select ulak.send_batch('shop', array['1', '2']::jsonb[])")
    if event == "message.redriven":
        db.execute("select ulak.archive_single_to_dlq(1)")
    db.execute("delete from ulak.event_log")

    admin.execute(statement, [LONG_AGO])  # type: ignore[call-overload]

    query = "select distinct event, actor, created_at > now() - interval '1 hour' from ulak.event_log"
    assert db.execute(query).fetchall() == [(event, "test_ulak_admin", True)]


def test_the_circuits_probe_is_logged_by_the_clock_as_well(db: DB, admin: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.send('shop', '1')")
    db.execute("select ulak.update_circuit_breaker(1, false) from generate_series(1, 10)")

    admin.execute("select ulak.claim('w', p_now => now() + interval '1 year')")

    query = "select created_at < now() + interval '1 hour' from ulak.event_log where event = 'circuit.half_open'"
    assert db.execute(query).fetchall() == [(True,)]


def test_no_notification_is_sent_past_the_guard_against_a_full_queue(db: DB) -> None:
    """A full notification queue makes every NOTIFY fail: one function checks first, and the others call it."""
    query = "select proname from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and prosrc ~ 'pg_notify|notify ulak'"

    assert db.execute(query).fetchall() == [("wake_workers",)]


@pytest.fixture
def files(tmp_path: Path, certificate: Certificate) -> dict[str, str]:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no certificate\n")
    (tmp_path / "large").write_bytes(certificate.certificate.read_bytes() + b"\n" * 1024 * 1024)
    (tmp_path / "locked").write_bytes(certificate.certificate.read_bytes())
    (tmp_path / "locked").chmod(0)
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    found = {name: str(tmp_path / name) for name in ("fifo", "text", "large", "locked", "broken", "missing")}
    return found | {
        "folder": str(tmp_path),
        "endless": "/dev/zero",
        "empty": "/dev/null",
        "own_memory": "/proc/self/mem",
        "own_pipe": "/proc/self/fd/0",
    }


def config_with(key: str, path: str, url: str, certificate: Certificate) -> dict[str, Any]:
    trusted = {"tls_ca_bundle": str(certificate.certificate)}
    if key == "proxy":
        return {**trusted, "proxy": {"url": url, "ca_bundle": path}}
    if key == "tls_client_key":
        return {**trusted, "tls_client_cert": str(certificate.certificate), key: path}
    return {**trusted, key: path}


@pytest.mark.parametrize("key", KEYS)
def test_every_problem_with_a_file_looks_the_same_and_delays_no_delivery(
    site: Site, receiver: Receiver, certificate: Certificate, files: dict[str, str], key: str
) -> None:
    with Receiver(certificate=certificate) as secure:
        for name, path in files.items():
            site.http(name, secure.url, ONCE, **config_with(key, path, secure.url, certificate))
            site.send(name)
        site.http("healthy", receiver.url)
        worker = site.start()

        healthy = site.send("healthy")
        site.wait_for_status(healthy, "completed")
        site.wait_until_settled()

        errors = dict(site.db.execute("select endpoint_name, last_error from ulak.dlq").fetchall())
        assert errors == dict.fromkeys(files, FILE_PROBLEM)
        assert secure.requests == []
        assert not worker.call.is_done()


def test_a_file_that_is_replaced_counts_from_then_on(site: Site, certificate: Certificate, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.write_bytes(certificate.certificate.read_bytes())
    with Receiver(certificate=certificate) as secure:
        site.http("shop", secure.url, ONCE, tls_ca_bundle=str(bundle))
        worker = site.start()
        site.wait_for_status(site.send("shop"), "completed")

        bundle.unlink()
        os.mkfifo(bundle)
        error = site.wait_for_status(site.send("shop"), "failed")["last_error"]
        bundle.unlink()
        bundle.write_bytes(certificate.certificate.read_bytes())
        site.wait_for_status(site.send("shop"), "completed")

    assert error == FILE_PROBLEM
    assert not worker.call.is_done()


@pytest.mark.parametrize("name", ["fifo", "endless"])
def test_ping_does_not_wait_for_a_file_either(
    site: Site, certificate: Certificate, files: dict[str, str], name: str
) -> None:
    with Receiver(certificate=certificate) as secure, site.connect("ulak_admin") as admin:
        site.http(name, secure.url, tls_ca_bundle=files[name])

        row = admin.execute("select outcome, error from ulak.ping(%s)", [name]).fetchone()

    assert row == ("failed", FILE_PROBLEM)


def test_curl_shows_no_secret_wherever_it_stands(site: Site) -> None:
    for name, value in SECRETS.items():
        site.call("set_secret", name, value)
    site.http(
        "shop",
        {"$secret": "url"},  # type: ignore[arg-type]
        headers={"x-team": {"$secret": "header"}, "x-plain": "shown"},
        proxy={
            "url": {"$secret": "proxy"},
            "username": {"$secret": "user"},
            "password": {"$secret": "password"},
        },
        auth={"type": "bearer", "token": {"$secret": "token"}},
        signing_secret={"$secret": "signing"},
    )
    id = site.send("shop", {"price": 5})

    with site.connect("ulak_admin") as admin:
        row = admin.execute("select ulak.curl(%s)", [id]).fetchone()

    assert row is not None
    words = shlex.split(row[0])
    assert "hush" not in row[0]
    assert "x-plain: shown" in words
    assert '{"price": 5}' in words
    assert re.search(r"authorization: Bearer \*\*\*\*", row[0])


@pytest.mark.parametrize(
    "config",
    [
        {"cloudevents": True, "cloudevents_source": {"$secret": "header"}},
        {"cloudevents": True, "cloudevents_type": {"$secret": "header"}},
        {"cloudevents": True, "cloudevents_subject": {"$secret": "header"}},
        {"signing_secret": "long enough", "signature": {"scheme": "hmac", "header": {"$secret": "header"}}},
        {
            "signing_secret": "long enough",
            "signature": {"scheme": "hmac", "header": "x", "prefix": {"$secret": "header"}},
        },
        {"tls_ca_bundle": {"$secret": "header"}},
        {"method": {"$secret": "header"}},
        {"retry_on": [{"$secret": "header"}]},
        {"proxy": {"url": "http://p:1", "no_proxy": {"$secret": "header"}}},
        {
            "auth": {
                "type": "oauth2",
                "token_url": "http://x",
                "client_id": "i",
                "client_secret": "s",
                "scope": {"$secret": "header"},
            }
        },
        {"auth": {"$secret": "header"}},
    ],
)
def test_a_secret_stands_only_where_a_credential_belongs(db: DB, admin: DB, config: dict[str, Any]) -> None:
    db.execute("select ulak.set_secret('header', 'hush-header')")
    given = Jsonb({"url": "https://example.com", **config})

    for statement in (
        "select ulak.create_endpoint('shop', 'http', %s)",
        "select ulak.validate_endpoint_config('http', %s)",
    ):
        denied = refused(admin, statement, given)

        assert denied.sqlstate == "22023"
        assert f"{denied.message_primary}".endswith(" must not be a secret")
        assert "hush" not in f"{denied.message_detail} {denied.message_hint}"


@pytest.mark.parametrize(
    "config", [{"headers": {"x": {"$secret": "{}"}}}, {"signing_secret": {"$secret": "{}"}}, {"url": {"$secret": "{}"}}]
)
def test_the_signing_secret_of_another_endpoint_can_not_be_named(db: DB, admin: DB, config: dict[str, Any]) -> None:
    admin.execute("""select ulak.create_endpoint('other', 'http', '{"url": "https://example.com"}')""")
    admin.execute("select ulak.rotate_secret('other')")
    (name,) = db.execute("select name from ulak_private.secrets").fetchone() or ("",)
    given = json.dumps({"url": "https://example.com", **config}).replace('"{}"', json.dumps(name))

    denied = refused(admin, "select ulak.create_endpoint('shop', 'http', %s)", given)

    assert f"{denied.message_primary}".endswith(" names a secret that belongs to another endpoint")
    admin.execute("select ulak.rotate_secret('other')")
    admin.execute("select ulak.alter_endpoint('other', config || '{\"timeout\": 5}') from ulak.endpoints")


def test_curl_hides_a_secret_in_a_body_that_is_no_payload(db: DB, admin: DB) -> None:
    """The body of a structured CloudEvent also has what the config says."""
    admin.execute("select ulak.set_secret('token', 'hush-a-long-token')")
    config = {
        "url": "https://example.com",
        "auth": {"type": "bearer", "token": {"$secret": "token"}},
        "cloudevents": True,
        "cloudevents_mode": "structured",
        "cloudevents_source": "/shops/hush-a-long-token",
    }
    admin.execute("select ulak.create_endpoint('shop', 'http', %s)", [Jsonb(config)])
    (id,) = db.execute("select ulak.send('shop', '{\"price\": 5}')").fetchone() or (0,)

    (told,) = admin.execute("select ulak.curl(%s)", [id]).fetchone() or ("",)

    assert "hush" not in told
    assert '"data":{"price": 5}' in told


@pytest.mark.parametrize("body", ["@/etc/hostname", "-d@/etc/hostname", "a\x1b]0;owned\x07'b\\", "line\nline\u202e"])
def test_curl_sends_a_body_as_it_is_and_no_file(site: Site, receiver: Receiver, body: str) -> None:
    site.http("shop", receiver.url)
    id = site.value("select ulak.send('shop', p_raw => %s, p_path => 'a')", body)

    with site.connect("ulak_admin") as admin:
        (command,) = admin.execute("select ulak.curl(%s)", [id]).fetchone() or ("",)
    subprocess.run(["bash", "-c", f"{command} --silent --output /dev/null"], check=True)

    (request,) = receiver.wait_for(1)
    assert request.body == body.encode()
    assert command.isprintable()
    assert "--data-raw" in command
    assert "--globoff" in command


def test_a_captured_answer_and_a_ping_show_no_secret_that_was_echoed(site: Site, echo: Receiver) -> None:
    site.configure(capture_response="true")
    site.call("set_secret", "token", "hush-token-1")
    site.call("set_secret", "key", "hush/key+2")
    site.http(
        "shop",
        echo.url,
        ONCE,
        auth={"type": "bearer", "token": {"$secret": "token"}},
        headers={"x-own": {"$secret": "key"}},
        signing_secret="hush-signing-3",
    )
    id = site.send("shop")
    site.start()
    site.wait_for_status(id, "failed")

    with site.connect("ulak_admin") as admin:
        (response,) = admin.execute("select response from ulak.messages where id = %s", [id]).fetchone() or [None]
        ping = admin.execute("select error, response from ulak.ping('shop')").fetchone()

    request = echo.requests[0]
    told = f"{response} {ping}"
    assert "x-echo" in response["headers"]
    assert "hush" not in told
    assert request.headers["webhook-signature"].partition(",")[2] not in told


@pytest.mark.parametrize("name", ["x-hub-signature-256", "X-Sealed-By"])
def test_a_signature_is_shown_in_no_header_whatever_its_name_is(site: Site, name: str) -> None:
    """It is valid for as long as the secret is, unlike one with a time in it."""
    site.configure(capture_response="true")
    scheme = {"scheme": "github"} if name.startswith("x-hub") else {"scheme": "hmac", "header": name}

    def echo(request: Received) -> Answer:
        seal = request.headers[name.lower()]
        return Answer(422, {name: seal, "x-echo": seal}, f"{name}: {seal}".encode())

    with Receiver(echo) as receiver:
        site.http("shop", receiver.url, ONCE, signing_secret="hush-signing-secret", signature=scheme)
        id = site.send("shop")
        site.start()
        error = site.wait_for_status(id, "failed")["last_error"]
        (request,) = receiver.requests
        seal = request.headers[name.lower()].removeprefix("sha256=")
        with site.connect("ulak_admin") as admin:
            told = admin.execute("select ulak.curl(id), response from ulak.messages where id = %s", [id]).fetchone()
            ping = admin.execute("select error, response from ulak.ping('shop')").fetchone()
        (pinged,) = receiver.requests[1:]

    assert len(seal) == 64
    assert seal not in f"{error} {told} {ping}"
    assert pinged.headers[name.lower()].removeprefix("sha256=") not in str(ping)
    assert "x-echo" in str(told)


def test_a_config_that_cannot_be_read_costs_no_other_endpoint_its_deliveries(
    site_in: Callable[[str], Site], receiver: Receiver
) -> None:
    site = site_in("SQL_ASCII")
    for name in ("broken", "healthy"):
        site.http(name, receiver.url, ONCE)
    site.db.execute("""
        update ulak.endpoints
        set config = config || jsonb_build_object('headers', jsonb_build_object('x-own', convert_from('\\xff', 'SQL_ASCII')))
        where name = 'broken'
    """)
    broken, healthy = site.send("broken"), site.send("healthy")

    worker = site.start()

    site.wait_for_status(healthy, "completed")
    assert (
        site.wait_for_status(broken, "failed")["last_error"]
        == "[RETRYABLE] config: it can't be read: it isn't valid UTF-8, or has a number with too many digits"
    )
    assert not worker.call.is_done()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            """select ulak.create_endpoint('e', 'http', jsonb_build_object('url', 'https://example.com', 'headers',
                jsonb_build_object('x', repeat('x', 300000))))""",
            "the config of an endpoint is larger than 262144 bytes",
        ),
        (
            """select ulak.create_endpoint('e', 'http', jsonb_build_object('url', 'https://example.com', 'retry_on',
                (select jsonb_agg(500) from generate_series(1, 100000))))""",
            "the config of an endpoint is larger than 262144 bytes",
        ),
        (
            "select ulak.create_endpoint('e', 'pull', '{}', null, repeat('x', 20000))",
            "the description of an endpoint is larger than 10000 bytes",
        ),
        ("select ulak.set_secret('s', repeat('x', 70000))", "a secret is larger than 65536 bytes"),
    ],
)
def test_it_cannot_make_workers_read_configs_of_any_size(db: DB, admin: DB, statement: str, message: str) -> None:
    """Each worker reads them whenever they change, and neighbours wait meanwhile."""
    denied = refused(admin, statement)

    assert (denied.sqlstate, denied.message_primary) == ("54000", message)
    assert db.execute("select count(*) from ulak.endpoints").fetchone() == (0,)
