"""docker/console: what a monitor sees, what an administrator does by clicking, and what a foreign site can't do."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.browser import Browser
from support.cluster import PROJECT, Cluster
from support.console import Console
from support.queue import Queue
from support.receiver import Receiver
from support.sessions import wait_until

sys.path.insert(0, str(PROJECT / "docker" / "console"))
from ulak_console.actions import of_sql

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
    """An endpoint "shop" with three dead letters, and an endpoint whose name and error are hard to display."""
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
    wait_until(lambda: "brand new" in browser.text(), message="the refreshed page")

    assert browser.ask("window.here") is True
    assert browser.ask("document.querySelector('.folded').open") is True


def test_the_page_goes_on_after_a_click_on_a_finding_and_says_how_fresh_it_is(
    browser: Browser, console: Console, queue: Queue
) -> None:
    log_in(browser, console, "console_monitor")
    browser.open(f"{console.origin}/?refresh=5")
    assert "live, every 5 s" in browser.ask("document.getElementById('fresh').innerText")

    browser.click(".findings summary")
    assert browser.ask("document.activeElement.tagName") == "SUMMARY"
    queue.bury(queue.send(), "HTTP 404: brand new")
    wait_until(lambda: "brand new" in browser.text(), message="the refreshed page")

    # The finding is as it was left, and so is the focus.
    assert browser.ask("document.activeElement.tagName") == "SUMMARY"
    browser.ask("getSelection().selectAllChildren(document.querySelector('.tiles'))")
    wait_until(
        lambda: "paused while text is marked" in browser.ask("document.getElementById('fresh').innerText"),
        message="the reason to rest",
    )


def test_a_preview_shows_the_command_that_is_confirmed_with_its_rate(
    browser: Browser, console: Console, queue: Queue
) -> None:
    queue.call("disable_endpoint", "shop")
    log_in(browser, console, "console_admin")
    browser.open(f"{console.origin}/act/enable?endpoint=shop&rate=-1")

    assert browser.ask("document.querySelector('#wrong-rate').innerText") == "must be above 0"
    assert browser.ask("document.querySelector('#confirm')") is None
    browser.type("[name=rate]", "50")
    browser.follow(".fields button")

    shown = "select * from ulak.enable_endpoint(p_name => 'shop', p_rate => '50');"
    assert browser.ask("document.querySelector('#command').innerText") == shown
    browser.follow("#confirm")
    assert queue.rows("select enabled, release_rate from ulak.endpoints where name = 'shop'") == [
        {"enabled": True, "release_rate": 50}
    ]


def test_a_replay_of_a_range_shows_its_command_and_a_sample(browser: Browser, console: Console, queue: Queue) -> None:
    queue.send(payload={"word": "swordfish"})
    queue.complete(queue.claim_one(endpoint="shop"))
    log_in(browser, console, "console_admin")

    browser.open(f"{console.origin}/act/replay_range?endpoint=shop")
    browser.type("[name=from_ts]", "2020-01-01")
    browser.type("[name=to_ts]", "infinity")
    browser.type("[name=filter]", '$.word == "swordfish"')
    browser.follow(".fields button")

    told = browser.text()
    assert "1 finished message would be queued once more." in told
    assert "swordfish" in browser.ask("document.querySelector('.preview tbody').innerText")
    assert "ulak.replay_range(p_endpoint => 'shop', p_from_ts => '2020-01-01', p_to_ts => 'infinity'" in told
    browser.follow("#confirm")
    assert "1 message queued once more." in browser.text()


@pytest.mark.parametrize("key", ["message_id", "correlation_id", "idempotency_key"])
def test_a_message_is_found_by_what_its_sender_knows(
    browser: Browser, console: Console, queue: Queue, key: str
) -> None:
    id = queue.send(idempotency_key="order 7", correlation_id="0190a5d2-5b9e-7000-8000-000000000008")
    log_in(browser, console, "console_monitor")

    browser.type(".search input", str(queue.value(f"select {key} from ulak.queue where id = %s", id)))
    browser.follow(".search button")

    assert browser.ask("document.querySelector('h1').innerText") == f"Message {id}"


def test_endpoints_are_found_by_a_part_of_their_name(browser: Browser, console: Console, queue: Queue) -> None:
    queue.endpoint("shop 2")
    log_in(browser, console, "console_monitor")

    browser.type(".search input", "HO")
    browser.follow(".search button")
    assert browser.ask("[...document.querySelectorAll('main li a')].map(a => a.innerText)") == ["shop", "shop 2"]
    browser.follow("main li a")
    assert browser.ask("document.querySelector('h1').innerText") == "shop"

    browser.type(".search input", "no_such%")
    browser.follow(".search button")
    assert "Nothing matches" in browser.text()


def test_selected_dead_letters_are_redriven_and_no_others(browser: Browser, console: Console, queue: Queue) -> None:
    letters = queue.column("select id from ulak.dlq where endpoint_name = 'shop' order by id")
    log_in(browser, console, "console_admin")
    browser.follow("nav [href='/letters']")
    browser.type("[name=error_like]", "%HTTP 422%")
    browser.follow(".fields button")
    assert browser.ask("document.querySelectorAll('tbody tr').length") == 3

    browser.click(f"[name=tick][value='{letters[0]}']")
    browser.click(f"[name=tick][value='{letters[2]}']")
    browser.follow("[formaction='/act/redrive']")
    assert "2 dead letters match." in browser.text()
    browser.follow("#confirm")

    assert queue.column("select id from ulak.dlq where status = 'redriven' order by id") == [letters[0], letters[2]]


def test_waiting_messages_are_cancelled_and_retried_from_their_list(
    browser: Browser, console: Console, queue: Queue
) -> None:
    first, second = queue.send(), queue.send()
    queue.base = queue.value("select now()")
    for claim in queue.claim(2, endpoint="shop"):
        queue.fail(claim, retry_after=3600)
    log_in(browser, console, "console_admin")

    browser.open(f"{console.origin}/messages?endpoint=shop&status=pending")
    assert browser.ask("document.querySelector('[formaction=\"/act/purge\"]').disabled") is True
    browser.click(f"[name=tick][value='{first}']")
    browser.follow("[formaction='/act/purge']")
    browser.follow("#confirm")
    assert queue.column("select id from ulak.queue") == [second]

    browser.open(f"{console.origin}/messages?endpoint=shop&status=pending")
    browser.follow("[href^='/act/retry_now']")
    assert "1 message matches." in browser.text()
    browser.follow("#confirm")
    assert queue.value("select next_retry_at <= now() from ulak.queue")


def test_an_endpoints_page_has_charts_messages_letters_config_and_grants(
    browser: Browser, console: Console, queue: Queue
) -> None:
    id = queue.value("select id from ulak.endpoints where name = 'shop'")
    queue.db.execute(
        "insert into ulak.endpoint_stats (endpoint_id, minute, delivered, failed, latency_max_ms)"
        " values (%s, date_trunc('minute', now()), 30, 10, 250)",
        [id],
    )
    queue.db.execute("select ulak.grant_endpoint('shop', 'console_nobody')")
    message = queue.send()
    log_in(browser, console, "console_admin")

    browser.open(f"{console.origin}/endpoint?name=shop")

    heights = "[...document.querySelectorAll('rect')].map(r => [r.getAttribute('class'), +r.getAttribute('height')])"
    assert browser.ask(heights) == [["delivered", 75], ["failed", 25], ["slowest", 100]]
    assert str(message) in browser.ask("document.querySelector('#latest').innerText")
    assert "HTTP 422" in browser.ask("document.querySelector('#letters').innerText")
    assert "console_nobody" in browser.ask("document.querySelector('#grants').innerText")
    assert "circuit_breaker" in browser.text()


def test_an_endpoints_page_says_when_it_will_be_disabled(browser: Browser, console: Console, queue: Queue) -> None:
    queue.endpoint("broken", {"url": "https://example.com", "disable_after": "5 days"}, protocol="http")
    log_in(browser, console, "console_monitor")
    browser.open(f"{console.origin}/endpoint?name=broken")
    assert "disable at" not in browser.text()
    queue.db.execute("update ulak.endpoints set failing_since = '2026-11-01 08:00+00' where name = 'broken'")

    browser.open(f"{console.origin}/endpoint?name=broken")

    assert "disable at\n06 Nov 08:00:00" in browser.text()
    assert "disable_after\n5 days" in browser.text()
    queue.call("disable_endpoint", "broken")
    browser.open(f"{console.origin}/endpoint?name=broken")
    assert "disable at" not in browser.text()


def test_a_waiting_message_is_rescheduled_and_cancelled_on_its_page(
    browser: Browser, console: Console, queue: Queue
) -> None:
    id = queue.send()
    log_in(browser, console, "console_admin")
    browser.open(f"{console.origin}/message?id={id}")

    browser.follow("[href*='/act/reschedule?']")
    browser.type("[name=at]", "some day")
    browser.follow(".fields button")
    assert "invalid input syntax" in browser.ask("document.querySelector('#wrong-at').innerText")
    browser.type("[name=at]", "9999-01-01")
    browser.follow(".fields button")
    browser.follow("#confirm")
    # The function itself refuses, and the form is still there.
    assert "1970" in browser.ask("document.querySelector('.why, .alert').innerText")
    browser.type("[name=at]", str(queue.value("select now() + interval '1 day'")))
    browser.follow(".fields button")
    browser.follow("#confirm")
    assert queue.value("select scheduled_at > now() + interval '23 hours' from ulak.queue where id = %s", id)

    browser.open(f"{console.origin}/message?id={id}")
    browser.follow("[href*='/act/cancel?']")
    browser.follow("#confirm")
    assert queue.value("select status from ulak.archive where id = %s", id) == "cancelled"


def test_an_endpoint_is_pinged_and_its_secret_rotated(browser: Browser, console: Console, queue: Queue) -> None:
    queue.db.execute("select ulak.configure('http_allowed_networks', '127.0.0.0/8')")
    with Receiver() as receiver:
        queue.endpoint("hook", {"url": receiver.url}, protocol="http")
        log_in(browser, console, "console_admin")
        browser.open(f"{console.origin}/endpoint?name=hook")

        browser.follow("[href*='/act/ping?']")
        browser.follow("#confirm")
        assert "hook: delivered within" in browser.ask("document.querySelector('.told').innerText")
        assert len(receiver.requests) == 1

    browser.follow("[href*='/act/rotate?']")
    browser.follow("#confirm")
    assert "The new signing secret of hook is whsec_" in browser.ask("document.querySelector('.told').innerText")


def test_the_payload_is_for_administrators(browser: Browser, console: Console, queue: Queue) -> None:
    id = queue.send(payload={"word": "swordfish"}, headers={"x-word": "flounder"})
    for role, is_shown in (("console_monitor", False), ("console_admin", True)):
        browser.do("Network.clearBrowserCookies")
        log_in(browser, console, role)
        browser.open(f"{console.origin}/message?id={id}")

        assert ("swordfish" in browser.text()) is is_shown
        assert ("flounder" in browser.text()) is is_shown


def test_suggested_sql_has_a_button_that_leads_to_its_preview(browser: Browser, console: Console, queue: Queue) -> None:
    queue.send()
    queue.fail(queue.claim_one(endpoint="shop"), "[RETRYABLE] HTTP 503")
    assert queue.value("select circuit_state from ulak.endpoints where name = 'shop'") == "open"
    log_in(browser, console, "console_admin")

    browser.ask("for (const each of document.querySelectorAll('.findings details')) each.open = true")
    browser.follow(".findings [href='/act/reset?endpoint=shop']")

    assert "The circuit closes at once" in browser.text()
    browser.follow("#confirm")
    assert queue.value("select circuit_state from ulak.endpoints where name = 'shop'") == "closed"


def test_every_call_that_the_console_knows_is_read_from_suggested_sql() -> None:
    for text, read in {
        "select * from ulak.ping('it''s'); -- then: select ulak.reset_circuit_breaker('it''s');": [
            ("ping", {"endpoint": "it's"}),
            ("reset", {"endpoint": "it's"}),
        ],
        "select * from ulak.redrive(p_endpoint => 'a', p_error_like => '%(x), ''y''%', p_dry_run => true);": [
            ("redrive", {"endpoint": "a", "error_like": "%(x), 'y'%"})
        ],
        "select ulak.reschedule(7, now()); select ulak.cancel(7);": [("cancel", {"id": "7"})],
        "select ulak.redrive_message(id) from ulak.dlq;": [],
        "select ulak.configure('a', 'b');": [],
    }.items():
        assert [(action.name, given) for action, given in of_sql(text)] == read, text


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
        for path in (
            "/",
            "/endpoint?name=shop",
            "/act/redrive?endpoint=shop",
            "/act/replay_range",
            "/letters",
            "/messages",
        ):
            browser.open(console.origin + path)
            assert browser.ask("document.documentElement.scrollWidth") == 390, path
        browser.open(console.origin)
        # What is folded away can be unfolded.
        assert browser.ask("document.documentElement.scrollHeight") < 2500
        browser.click("details.foldable summary")
        assert browser.ask("document.querySelectorAll('details.foldable[open]').length") == 1
    finally:
        browser.resize(1280, 900)


# Without a browser: whatever a program may send.


@pytest.mark.parametrize(
    "role, password, reason",
    [
        ("console_admin", "wrong", "role or password is wrong"),
        ("unknown", PASSWORD, "did not ask for a password|cannot be reached"),
        ("console_admin", "", "enter a role and its password"),
        ("console_nobody", PASSWORD, "not a member of ulak_monitor or ulak_admin"),
        ("console_super", PASSWORD, "superusers can.*t log in here"),
        # pg_hba.conf trusts this one: any password would do.
        ("test_ulak_admin", "anything", "did not ask for a password"),
    ],
)
def test_a_rejected_login_gets_no_session(console: Console, role: str, password: str, reason: str) -> None:
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
    assert "What happened" in message.text


def test_guessing_passwords_is_slowed_down(cluster: Cluster, watched: str, tmp_path: Path) -> None:
    with Console(cluster, watched, tmp_path / "log") as console:
        for n in range(10):
            assert "is wrong" in console.login("console_admin", f"guess {n}").text

        answer = console.login("console_admin", PASSWORD)

    assert answer.status == 403
    assert "wait a minute" in answer.text


def test_without_a_login_every_page_leads_there(console: Console) -> None:
    for path in (
        "/",
        "/message?id=1",
        "/endpoint?name=shop",
        "/act/disable?endpoint=shop",
        "/letters",
        "/messages",
        "/search",
    ):
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


def test_a_refusal_of_the_database_is_shown_with_its_hint(console: Console, queue: Queue) -> None:
    session = cookies(console, "console_admin")

    for path, said in (
        ("/endpoint?name=shoop", "shoop"),
        ("/act/redrive?endpoint=shop&since=yesteryear", "invalid input syntax for type timestamp"),
        ("/act/redrive?limit=0", "must be above 0"),
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
