"""docker/console: what a monitor sees, what an administrator does by clicking, and what a foreign site can't do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.browser import Browser
from support.cluster import Cluster
from support.console import Console
from support.queue import Queue
from support.sessions import wait_until

PASSWORD = "pass & <word>"
HOSTILE = "</style><script>document.title='broken'</script>&amp; \"x\" '"
LOGINS = {"console_monitor": "ulak_monitor", "console_admin": "ulak_admin", "console_nobody": None}


@pytest.fixture(scope="module")
def watched(cluster: Cluster, module_database: str) -> Iterator[str]:
    """A database whose console logins need a password."""
    rules = cluster.data / "pg_hba.conf"
    before = rules.read_text()
    with cluster.connect(module_database) as db:
        for login, role in LOGINS.items():
            cluster.ensure_login(db, login, role)
            db.execute(f"alter role {login} password '{PASSWORD}'")
        cluster.ensure_login(db, "console_super")
        db.execute(f"alter role console_super superuser password '{PASSWORD}'")
    rules.write_text("".join(f"local all {each} scram-sha-256\n" for each in (*LOGINS, "console_super")) + before)
    cluster.reload()
    yield module_database
    rules.write_text(before)
    cluster.reload()
    for login in (*LOGINS, "console_super"):
        cluster.execute(f"drop role {login}")


@pytest.fixture(scope="module")
def console(cluster: Cluster, watched: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with Console(cluster, watched, tmp_path_factory.mktemp("console") / "log") as console:
        yield console


@pytest.fixture
def queue(cluster: Cluster, watched: str) -> Iterator[Queue]:
    """An endpoint "shop" with three dead letters, and an endpoint whose name and error are no help."""
    with cluster.connect(watched) as db:
        queue = Queue(db)
        later, queue.base = queue.base, queue.value("select now()")
        queue.empty()
        queue.endpoint("shop", {"circuit_breaker": {"threshold": 1, "cooldown": 3600}})
        queue.endpoint(HOSTILE)
        for id in queue.send_many(3):
            queue.bury(id, f"HTTP 422: order {id} is unknown")
        queue.bury(queue.send(HOSTILE), HOSTILE)
        queue.base = later
        yield queue


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    """Nobody is logged in."""
    window.do("Network.clearBrowserCookies")
    return window


def log_in(browser: Browser, console: Console, role: str) -> None:
    browser.open(console.origin)
    browser.type("[name=role]", role)
    browser.type("[name=password]", PASSWORD)
    browser.follow("main button")


def cookies(console: Console, role: str) -> dict[str, str]:
    return console.login(role, PASSWORD).cookies


# By clicking.


def test_a_monitor_looks_and_gets_no_buttons(browser: Browser, console: Console, queue: Queue) -> None:
    log_in(browser, console, "console_monitor")

    told = browser.text()
    assert "Newest dead letters" in told
    assert "console_monitor" in told
    assert browser.ask("document.title") == "ulak: test_console"
    assert browser.ask("document.querySelectorAll('main button, main .button').length") == 0
    # The style of the report is in force: the policy lets it through.
    assert browser.ask("getComputedStyle(document.querySelector('.tiles')).display") == "grid"

    browser.follow("[data-endpoint=shop] a")
    assert "dead letters\n3" in browser.text()
    assert browser.ask("document.querySelectorAll('.actions').length") == 0


def test_a_message_is_found_with_its_story_and_its_attempts(browser: Browser, console: Console, queue: Queue) -> None:
    id = queue.send()
    queue.fail(queue.claim_one(endpoint="shop"), "[RETRYABLE] HTTP 503: upstream")
    log_in(browser, console, "console_monitor")

    browser.type(".search input", str(id))
    browser.follow(".search button")

    told = browser.text()
    assert f"Message {id}" in told
    assert 'to endpoint "shop"' in told and "sent by " in told
    assert "[RETRYABLE] HTTP 503: upstream" in told
    assert "failed" in browser.ask("document.querySelector('tbody').innerText")


def test_an_administrator_redrives_a_cause_after_a_look_at_it(browser: Browser, console: Console, queue: Queue) -> None:
    log_in(browser, console, "console_admin")

    browser.follow("[data-receiver=shop] .button")
    assert "3 dead letters match." in browser.text()
    assert queue.value("select count(*) from ulak.dlq where status = 'failed'") == 4
    # One that dies after the look isn't redriven by the confirmation.
    queue.bury(queue.send(), "HTTP 422: order 7 is unknown")
    browser.follow("#confirm")

    assert "3 dead letters went back into the queue." in browser.text()
    assert queue.column("select redriven_by from ulak.dlq where status = 'redriven'") == ["console_admin"] * 3
    assert queue.value("select count(*) from ulak.dlq where status = 'failed'") == 2


def test_an_administrator_discards_dead_letters_after_a_look_at_them(
    browser: Browser, console: Console, queue: Queue
) -> None:
    log_in(browser, console, "console_admin")

    browser.follow("[data-endpoint=shop] a")
    browser.follow(".actions [href*='/act/discard?']")
    assert "3 dead letters match." in browser.text()
    assert queue.value("select count(*) from ulak.dlq where status = 'failed'") == 4
    browser.follow("#confirm")

    assert "3 dead letters discarded." in browser.text()
    assert queue.column("select endpoint_name from ulak.dlq where status = 'failed'") == [HOSTILE]


def test_an_administrator_redrives_one_dead_letter(browser: Browser, console: Console, queue: Queue) -> None:
    id = queue.value("select max(id) from ulak.dlq where endpoint_name = 'shop'")
    log_in(browser, console, "console_admin")

    browser.follow(f"[data-letter='{id}'] a")
    browser.follow("#confirm")

    assert f"Dead letter {id} was redriven as message" in browser.text()
    assert queue.column("select id from ulak.dlq where status = 'redriven'") == [id]


@pytest.mark.parametrize(
    "action, before, after",
    [
        ("disable", "true", "not enabled"),
        ("enable", "disable_endpoint", "enabled"),
        ("reset", "trip", "circuit_state = 'closed'"),
    ],
)
def test_an_administrator_switches_an_endpoint(
    browser: Browser, console: Console, queue: Queue, action: str, before: str, after: str
) -> None:
    if before == "trip":
        queue.send()
        queue.fail(queue.claim_one(endpoint="shop"), "[RETRYABLE] HTTP 503")
        assert queue.value("select circuit_state from ulak.endpoints where name = 'shop'") == "open"
    elif before != "true":
        queue.call(before, "shop")
    state = f"select {after} from ulak.endpoints where name = 'shop'"
    log_in(browser, console, "console_admin")

    browser.follow("[data-endpoint=shop] a")
    browser.follow(f".actions [href*='/act/{action}?']")
    assert queue.value(state) is False
    browser.follow("#confirm")

    assert "shop" in browser.ask("document.querySelector('.told').innerText")
    assert queue.value(state) is True


def test_an_administrator_replays_an_archived_message(browser: Browser, console: Console, queue: Queue) -> None:
    id = queue.send()
    queue.complete(queue.claim_one(endpoint="shop"))
    queue.call("archive_completed_messages", 1, now=queue.at(10))
    log_in(browser, console, "console_admin")

    browser.type(".search input", str(id))
    browser.follow(".search button")
    browser.follow(".actions .button")
    browser.follow("#confirm")

    assert f"Message {id} was replayed as message" in browser.text()
    assert queue.value("select count(*) from ulak.queue where status = 'pending'") == 1


def test_the_page_refreshes_itself_and_keeps_what_was_unfolded(
    browser: Browser, console: Console, queue: Queue
) -> None:
    queue.endpoint("quiet")
    log_in(browser, console, "console_monitor")
    browser.open(f"{console.origin}/?refresh=5")
    browser.click(".folded summary")
    browser.ask("document.activeElement.blur(); window.here = true")

    queue.bury(queue.send(), "HTTP 404: brand new")
    wait_until(lambda: "brand new" in browser.text(), timeout=30, message="the refreshed page")

    assert browser.ask("window.here") is True
    assert browser.ask("document.querySelector('.folded').open") is True


def test_hostile_names_and_errors_are_only_text(browser: Browser, console: Console, queue: Queue) -> None:
    log_in(browser, console, "console_admin")
    assert browser.ask("document.title") == "ulak: test_console"
    assert HOSTILE in browser.text()

    link = f"[data-endpoint={CSS_STRING}] a"
    browser.follow(link)

    assert browser.ask("document.querySelector('h1').innerText") == HOSTILE
    browser.follow(".actions [href*='/act/redrive?']")
    assert "1 dead letter matches." in browser.text()
    assert browser.ask("document.scripts.length") == 1


CSS_STRING = '"' + HOSTILE.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_it_fits_a_phone(browser: Browser, console: Console, queue: Queue) -> None:
    log_in(browser, console, "console_admin")
    browser.resize(390, 844)
    try:
        for path in ("/", "/endpoint?name=shop", "/act/redrive?endpoint=shop", "/act/replay_range"):
            browser.open(console.origin + path)
            assert browser.ask("document.documentElement.scrollWidth") == 390, path
    finally:
        browser.resize(1280, 900)


# Without a browser: whatever a program may send.


@pytest.mark.parametrize(
    "role, password, reason",
    [
        ("console_admin", "wrong", "role or password is wrong"),
        ("unknown", PASSWORD, "did not ask for a password|cannot be reached"),
        ("console_admin", "", "are needed"),
        ("console_nobody", PASSWORD, "no member of ulak_monitor or ulak_admin"),
        ("console_super", PASSWORD, "not as a superuser"),
        # pg_hba.conf trusts this one: any password would do.
        ("test_ulak_admin", "anything", "did not ask for a password"),
    ],
)
def test_who_may_not_log_in_gets_no_session(console: Console, role: str, password: str, reason: str) -> None:
    answer = console.login(role, password)

    assert answer.status == 403
    assert re.search(reason, answer.text)
    assert "ulak" not in answer.cookies


def test_a_database_without_an_encoding_is_shown_too(cluster: Cluster, watched: str, tmp_path: Path) -> None:
    with cluster.database("console_ascii", options="encoding 'SQL_ASCII' locale 'C'") as name:
        cluster.install(name)
        with Console(cluster, name, tmp_path / "log") as console:
            answer = console.get("/", cookies(console, "console_monitor"))

    assert answer.status == 200
    assert "What happened" in answer.text


def test_an_error_that_no_xml_holds_is_shown_too(console: Console, queue: Queue) -> None:
    """As an earlier version has stored it."""
    queue.db.execute("update ulak.dlq set last_error = E'[RETRYABLE] odd \\uFFFF \\uFFFE text'")

    answer = console.get("/", cookies(console, "console_monitor"))

    assert answer.status == 200
    assert "odd \ufffd \ufffd text" in answer.text


def test_a_part_that_fails_costs_no_other_part(console: Console, queue: Queue) -> None:
    seen = cookies(console, "console_monitor")
    queue.db.execute("revoke execute on function ulak.report from ulak_monitor")
    queue.db.execute("revoke execute on function ulak.history from ulak_monitor")
    try:
        overview = console.get("/", seen)
        message = console.get(f"/message?id={queue.send()}", seen)
    finally:
        queue.db.execute("grant execute on function ulak.report to ulak_monitor")
        queue.db.execute("grant execute on function ulak.history to ulak_monitor")

    assert (overview.status, message.status) == (200, 200)
    assert "The report can&#39;t be shown: permission denied for function report" in overview.text
    assert 'href="/endpoint?name=shop"' in overview.text
    assert "The attempts can&#39;t be shown" in message.text
    assert "Its story" in message.text


def test_who_guesses_passwords_has_to_wait(cluster: Cluster, watched: str, tmp_path: Path) -> None:
    with Console(cluster, watched, tmp_path / "log") as console:
        for n in range(10):
            assert "is wrong" in console.login("console_admin", f"guess {n}").text

        answer = console.login("console_admin", PASSWORD)

    assert answer.status == 403
    assert "wait a minute" in answer.text


def test_without_a_login_every_page_leads_there(console: Console) -> None:
    for path in ("/", "/message?id=1", "/endpoint?name=shop", "/act/disable?endpoint=shop"):
        for cookie in ({}, {"ulak": "guessed"}):
            answer = console.get(path, cookie)
            assert (answer.status, answer.headers["Location"]) == (303, "/login")
    assert console.post("/act/disable", {"endpoint": "shop"}).status == 303


def test_the_cookie_holds_no_password_and_no_foreign_site_gets_it_sent(console: Console) -> None:
    answer = console.login("console_admin", PASSWORD)

    (given,) = answer.headers.get_all("Set-Cookie")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(given.split("; "))
    assert "console_admin" not in given
    assert "word" not in given


def test_nothing_in_a_page_may_run_but_its_own_files(console: Console) -> None:
    answer = console.get("/", cookies(console, "console_monitor"))

    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert re.search(r"<script(?! src=)| on[a-z]+=| style=", answer.text) is None


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": ""},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_form_of_another_site_does_nothing(console: Console, queue: Queue, headers: dict[str, str]) -> None:
    session = cookies(console, "console_admin")
    token = console.get("/act/disable?endpoint=shop", session).text
    form = {"endpoint": "shop", "token": re.findall('name="token" value="([^"]+)"', token)[-1]}

    assert console.post("/act/disable", form, session, **headers).status == 403
    assert queue.value("select enabled from ulak.endpoints where name = 'shop'") is True

    assert console.post("/act/disable", form, session).status == 303
    assert queue.value("select enabled from ulak.endpoints where name = 'shop'") is False


def test_a_token_confirms_its_own_form_in_its_own_session_only(console: Console, queue: Queue) -> None:
    session, other = cookies(console, "console_admin"), cookies(console, "console_admin")
    page = console.get("/act/disable?endpoint=shop", session).text
    token = re.findall('name="token" value="([^"]+)"', page)[-1]

    for given, form, path in (
        (session, {"endpoint": "shop", "token": ""}, "disable"),
        (session, {"endpoint": "shop", "token": "é"}, "disable"),
        (session, {"endpoint": HOSTILE, "token": token}, "disable"),
        (session, {"endpoint": "shop", "token": token}, "reset"),
        (other, {"endpoint": "shop", "token": token}, "disable"),
    ):
        assert console.post(f"/act/{path}", form, given).status == 403
    assert queue.column("select enabled from ulak.endpoints") == [True, True]


def test_a_foreign_name_for_this_machine_is_refused(console: Console) -> None:
    answer = console.get("/login", Host="evil.example")

    assert answer.status == 400
    assert "password" not in answer.text


def test_a_monitor_may_not_act_even_by_hand(console: Console, queue: Queue) -> None:
    session = cookies(console, "console_monitor")

    assert console.get("/act/disable?endpoint=shop", session).status == 403
    assert console.post("/act/disable", {"endpoint": "shop"}, session).status == 403


def test_what_the_database_refuses_is_told_with_its_hint(console: Console, queue: Queue) -> None:
    session = cookies(console, "console_admin")

    for path, said in (
        ("/endpoint?name=shoop", "shoop"),
        ("/act/redrive?endpoint=shop&since=yesteryear", "invalid input syntax for type timestamp"),
        ("/act/redrive?limit=0", "p_limit"),
        ("/message?id=999999", "message 999999 is not known"),
        ("/message?id=x", "the number that send() returned"),
    ):
        answer = console.get(path, session)
        assert answer.status == 400, path
        assert said in answer.text


def test_a_session_ends_when_its_user_leaves_and_when_the_server_ends_it(
    console: Console, queue: Queue, db: psycopg.Connection[Any]
) -> None:
    session = cookies(console, "console_monitor")
    token = console.get("/message?id=0", session).hidden("token")

    assert console.post("/logout", {"token": token}, session).status == 303
    assert console.get("/", session).status == 303

    session = cookies(console, "console_monitor")
    db.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'console_monitor'")
    assert console.get("/", session).status == 303
    assert console.get("/login", session).status == 200
