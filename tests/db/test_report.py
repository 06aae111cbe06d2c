"""report(): one page that needs nothing else, whatever names and errors it has to show, in light and dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import browser
from support.cluster import Connect
from support.queue import Queue
from support.statistics import add_worker, worked

HOSTILE = "</style><script>document.title='broken'</script>&amp; \"x\" '"


def page(queue: Queue, hours: int = 6, now: float = 0) -> str:
    return str(queue.value("select ulak.report(%s, %s)", hours, queue.at(now)))


def parsed(html: str) -> ElementTree.Element:
    """As XML, which forgives nothing: each element closed, each attribute quoted, each character escaped."""
    doctype, rest = html.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def text(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def busy(queue: Queue) -> Queue:
    """Some of everything."""
    endpoint = queue.endpoint("shop")
    for minutes in range(0, 360, 5):
        worked(
            queue,
            endpoint,
            delivered=600,
            failed=minutes % 4,
            milliseconds=9000,
            b4=500,
            b7=90,
            b9=10,
            now=-60 * minutes,
        )
    queue.endpoint("bank", {"circuit_breaker": {"threshold": 1}})
    queue.send_many(5, "bank")
    queue.fail(queue.claim_one(endpoint="bank"), "[RETRYABLE] HTTP 503: upstream")
    for id in queue.send_many(4, "shop"):
        queue.bury(id, f"HTTP 422: order {id} is unknown")
    queue.value("select ulak_private.sample_backlog(%s)", queue.base)
    add_worker(queue)
    return queue


def test_it_is_one_well_formed_page_that_asks_for_nothing_else(queue: Queue) -> None:
    html = page(busy(queue))

    root = parsed(html)

    assert root.tag == "html"
    assert {element.tag for element in root.iter()} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "form",
        "a",
    } == set()
    assert [
        name for element in root.iter() for name in element.attrib if name in ("src", "href") or name.startswith("on")
    ] == []
    assert re.search(r"https?:|//[a-z]|url\(|@import|data:", html) is None
    # A server's strict policy refuses style in attributes.
    assert [element.tag for element in root.iter() if "style" in element.attrib] == []


def test_it_tells_what_an_administrator_wants_to_know(queue: Queue) -> None:
    root = parsed(page(busy(queue)))

    told = text(root)

    for expected in (
        "Needs attention",
        "Delivered 43,200",
        "Dead letters 4 not redriven",
        "Workers 1 alive",
        "○ open bank",
        "[RETRYABLE] HTTP 503: upstream",
        "[PERMANENT] HTTP 422: order # is unknown 4",
        "Open circuits",
        "Retry schedule",
        "circuit.opened",
        "archive_default",
    ):
        assert expected in told


def test_the_worst_endpoint_comes_first(queue: Queue) -> None:
    root = parsed(page(busy(queue)))

    names = [text(each) for each in root.iter("td") if each.get("class") == "name"]

    assert names[:2] == ["bank pull", "shop pull"]


def test_many_findings_of_a_kind_do_not_hide_another(queue: Queue) -> None:
    for n in range(9):
        queue.endpoint(f"open {n}", {"url": "https://example.com/hook"}, protocol="http")

    root = parsed(page(queue))
    told = [text(each) for each in root.iter("summary")]

    assert [each for each in told if "no worker is alive" in each]
    assert "and 6 more like these" in told
    assert len([each for each in told if "not signed" in each]) == 9


def test_charts_follow_the_counters(queue: Queue) -> None:
    root = parsed(page(busy(queue)))
    charts = {each.attrib["aria-label"]: each for each in root.iter("svg") if "aria-label" in each.attrib}

    bars = list(charts["Deliveries and failed attempts per second"].iter("rect"))

    assert len([each for each in bars if each.get("class") == "delivered"]) == 60
    assert "Latency of requests in milliseconds" in charts
    assert "Messages that wait" in charts


def sections(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {str(each.findtext(".//h2")): each for each in root.iter("section")}


def commands(section: ElementTree.Element) -> list[str]:
    return [text(each) for each in section.iter("code")]


def test_a_dead_letter_comes_with_its_id_its_cause_and_the_command_that_redrives_it(queue: Queue) -> None:
    queue.endpoint("shop")
    ids = [queue.bury(queue.send(), f"HTTP 422: order {n}") for n in range(12)]
    newest = sections(parsed(page(queue)))["Newest dead letters"]

    first = next(iter(newest.iter("li")))
    assert text(first).startswith(f"{ids[-1]} shop message ")
    assert "[PERMANENT] HTTP 422: order 11" in text(first)
    assert commands(newest) == [f"select ulak.redrive_message({id});" for id in reversed(ids[-10:])]

    queue.value(commands(newest)[0])
    left = sections(parsed(page(queue)))["Newest dead letters"]
    assert commands(left) == [f"select ulak.redrive_message({id});" for id in reversed(ids[-11:-1])]


@pytest.mark.parametrize(
    "error",
    [
        "HTTP 422: order {n} is 100% unknown_",
        "a\\b {n}",
        "it's # {n}",
        "x" * 300 + " {n}",
        "%" * 157 + "\\{n}",
    ],
)
def test_the_command_of_a_cause_finds_its_dead_letters_and_no_others(queue: Queue, error: str) -> None:
    queue.endpoint("it's a shop")
    for n in range(3):
        queue.bury(queue.send("it's a shop"), error.format(n=n))
    queue.bury(queue.send("it's a shop"), "HTTP 404")

    rows = queue.value("select ulak_private.report_dead()")

    assert rows[0]["letters"] == 3
    assert queue.rows(rows[0]["command"])[0]["messages"] == 3


def test_dead_letters_of_a_dropped_endpoint_have_no_command(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.bury(queue.send())
    queue.value("delete from ulak.queue returning 1")
    queue.value("delete from ulak.endpoints returning 1")

    found = sections(parsed(page(queue)))

    for title in ("Newest dead letters", "Dead letters by cause"):
        assert commands(found[title]) == []
        assert "Its endpoint was dropped" in text(found[title])


def test_an_open_circuit_comes_with_its_next_probe_and_the_command_that_closes_it(queue: Queue) -> None:
    queue.endpoint("it's", {"circuit_breaker": {"threshold": 1, "cooldown": 90}})
    queue.send("it's")
    queue.fail(queue.claim_one(endpoint="it's"), "[RETRYABLE] HTTP 503: upstream")

    circuits = sections(parsed(page(queue)))["Open circuits"]
    assert "next probe in 1 m 30 s" in text(circuits)
    assert "HTTP 503: upstream" in text(circuits)
    assert "the next probe is due" in text(sections(parsed(page(queue, now=91)))["Open circuits"])

    assert queue.value(*commands(circuits)) is True
    assert "Open circuits" not in sections(parsed(page(queue)))


def test_it_tells_what_waits_until_when(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.send_many(3)
    for seconds in (30, 40, 1000):
        queue.send(scheduled_at=seconds)

    schedule = sections(parsed(page(queue)))["Retry schedule"]

    head, row = ([text(each) for each in line] for line in schedule.iter("tr"))
    assert dict(zip(head, row, strict=True)) == {
        "endpoint": "shop",
        "now": "3",
        "1 min": "2",
        "1 h": "1",
        "next": "in 30 s",
    }


def test_the_numbers_of_a_long_backlog_agree_with_each_other(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.send_many(5201)
    queue.send(scheduled_at=1000)
    queue.db.execute("select ulak_private.sample_backlog(%s)", [queue.at(0)])

    told = parsed(page(queue))

    schedule = sections(told)["Retry schedule"]
    head, row = ([text(each) for each in line] for line in schedule.iter("tr"))
    assert dict(zip(head, row, strict=True))["now"] == "~5,201"
    assert "2,500+" not in text(told)


def test_equal_entries_of_the_log_in_a_row_become_one(queue: Queue) -> None:
    queue.endpoint("shop")
    for id in queue.send_many(30):
        queue.bury(id)
    queue.call("disable_endpoint", "shop")

    log = [text(each) for each in sections(parsed(page(queue)))["What happened"].iter("li")]

    assert "endpoint.disabled shop" in log[0]
    assert "enabled: true → false" in log[0]
    assert "message.dead 30 times shop" in log[1]
    assert len(log) == 3


@pytest.mark.parametrize("minutes, steps", [(5, 20), (45, 45), (200, 50), (1000, 60)])
def test_the_axis_is_no_longer_than_what_is_known(queue: Queue, minutes: int, steps: int) -> None:
    worked(queue, queue.endpoint("shop"), delivered=60, now=-60 * (minutes - 1))

    traffic = queue.value("select ulak_private.report_traffic(6, %s)", queue.at(0))

    assert len(traffic) == steps
    assert sum(each["delivered"] for each in traffic) == (60 if minutes <= 360 else 0)
    if 20 <= minutes <= 360:
        assert traffic[0]["delivered"] == 60


def test_an_hour_of_failures_is_seen_in_its_sparkline(queue: Queue) -> None:
    worked(queue, queue.endpoint("shop"), failed=7, now=-60)
    queue.send("shop")

    shown = sections(parsed(page(queue)))["Endpoints"]

    (spark,) = [each for each in shown.iter("svg") if each.get("class") == "sparkline"]
    assert spark.attrib["aria-label"] == "the last hour of shop: 0 delivered, 7 failed attempts"
    drawn = {each.attrib["class"]: each.attrib["d"].count("M") for each in spark.iter("path")}
    assert drawn == {"spark failed": 1, "spark none": 19}


def test_endpoints_with_nothing_to_do_are_folded(queue: Queue) -> None:
    for n in range(4):
        queue.endpoint(f"quiet {n}")
    queue.endpoint("shop")
    queue.send("shop")

    shown = sections(parsed(page(queue)))["Endpoints"]

    (folded,) = shown.iter("details")
    assert text(next(folded.iter("summary"))) == "4 with nothing to do"
    names = [each.findtext("b") for each in shown.iter("td") if each.get("class") == "name"]
    assert names == ["shop", "quiet 0", "quiet 1", "quiet 2", "quiet 3"]
    assert len(next(folded.iter("tbody"))) == 4


def test_the_receivers_host_is_shown_without_path_and_query(queue: Queue) -> None:
    queue.endpoint("shop", {"url": "https://hooks.example.com:8443/t0ken?key=s3cret"}, protocol="http")

    html = page(queue)

    assert "hooks.example.com:8443" in text(sections(parsed(html))["Endpoints"])
    assert "t0ken" not in html
    assert "s3cret" not in html


def test_numbers_and_ids_in_an_error_do_not_make_another_cause(queue: Queue) -> None:
    queue.endpoint("shop")
    for n, id in enumerate(queue.send_many(3)):
        queue.bury(id, f"HTTP 422: order {n} of 6f1c0d5e-0000-4000-8000-00000000000{n}")
    queue.bury(queue.send(), "HTTP 404: order 1")

    causes = [(row["cause"], row["letters"]) for row in queue.value("select ulak_private.report_dead()")]

    assert causes == [("[PERMANENT] HTTP 422: order # of #", 3), ("[PERMANENT] HTTP 404: order #", 1)]


@pytest.mark.parametrize("hours", [0, 169, None])
def test_a_span_that_makes_no_sense_is_refused(queue: Queue, hours: int | None) -> None:
    assert queue.refuses("report", hours).sqlstate == "22023"


def test_an_empty_installation_has_a_page_too(queue: Queue) -> None:
    told = text(parsed(page(queue, hours=1)))

    assert "There are no endpoints yet." in told
    assert "No dead letter waits for a decision." in told
    assert "Nothing waits." in told
    assert "Open circuits" not in told


def test_it_shows_no_payload_and_no_secret(queue: Queue) -> None:
    queue.call("set_secret", "api", "hunter2-hunter2")
    config = {"url": "https://example.com/x?key=hunter2", "auth": {"type": "bearer", "token": {"$secret": "api"}}}
    queue.endpoint("shop", config, protocol="http")
    queue.send("shop", {"iban": "secret-DE02120300000000202051"})
    queue.bury(queue.send("shop", {"iban": "secret-DE02120300000000202051"}))

    html = page(queue)

    assert "hunter2" not in html
    assert "secret-" not in html


def hostile(queue: Queue) -> str:
    queue.endpoint(HOSTILE)
    queue.fail(claimed(queue), HOSTILE)
    queue.bury(queue.send(HOSTILE), HOSTILE)
    return page(queue)


def claimed(queue: Queue) -> Any:
    queue.send(HOSTILE)
    return queue.claim_one(endpoint=HOSTILE)


def test_hostile_names_and_errors_are_only_text(queue: Queue) -> None:
    root = parsed(hostile(queue))

    assert list(root.iter("script")) == []
    assert HOSTILE in [each.text for each in root.iter("b")]


def test_a_browser_shows_it_as_it_is(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(hostile(queue))

    dom = browser.loaded(tmp_path / "report.html")

    assert "<script" not in dom
    assert "broken</title>" not in dom
    assert "Throughput" in dom


def test_it_looks_right_in_light_and_in_dark(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page(busy(queue)))

    pictures = {
        scheme: browser.screenshot(tmp_path / "report.html", tmp_path / f"{scheme}.png", scheme)
        for scheme in browser.SCHEMES
    }

    # The page's ground, as the style has it.
    assert browser.pixel(pictures["light"], 5, 5) == (0xF4, 0xF3, 0xEF)
    assert browser.pixel(pictures["dark"], 5, 5) == (0x0F, 0x11, 0x15)
    assert all(picture.stat().st_size > 50_000 for picture in pictures.values())


def test_it_fits_a_phone(queue: Queue, tmp_path: Path) -> None:
    """Nothing is wider than the window, so nothing is cut and nothing scrolls sideways."""
    (tmp_path / "report.html").write_text(page(busy(queue)))

    with browser.Browser(width=390, height=844) as phone:
        phone.open((tmp_path / "report.html").as_uri())

        assert phone.ask("document.documentElement.scrollWidth") == 390
        too_wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 390).length"
        assert phone.ask(too_wide) == 0
        assert phone.ask("[...document.querySelectorAll('svg.chart')].filter(e => e.checkVisibility()).length") == 3


def test_a_monitor_may_print_it(connect: Connect, db: psycopg.Connection[Any]) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    (html,) = connect("ulak_monitor").execute("select ulak.report()").fetchone()  # type: ignore[misc]

    assert "shop" in text(parsed(html))
