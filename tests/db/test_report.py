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
    queue.value("select ulak._sample_backlog(%s)", queue.base)
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


def test_numbers_and_ids_in_an_error_do_not_make_another_cause(queue: Queue) -> None:
    queue.endpoint("shop")
    for n, id in enumerate(queue.send_many(3)):
        queue.bury(id, f"HTTP 422: order {n} of 6f1c0d5e-0000-4000-8000-00000000000{n}")
    queue.bury(queue.send(), "HTTP 404: order 1")

    causes = [(row["cause"], row["letters"]) for row in queue.value("select ulak._report_dead()")]

    assert causes == [("[PERMANENT] HTTP 422: order # of #", 3), ("[PERMANENT] HTTP 404: order #", 1)]


@pytest.mark.parametrize("hours", [0, 169, None])
def test_a_span_that_makes_no_sense_is_refused(queue: Queue, hours: int | None) -> None:
    assert queue.refuses("report", hours).sqlstate == "22023"


def test_an_empty_installation_has_a_page_too(queue: Queue) -> None:
    told = text(parsed(page(queue, hours=1)))

    assert "There are no endpoints yet." in told
    assert "No dead letter waits for a decision." in told


def test_it_shows_no_payload_and_no_secret(queue: Queue) -> None:
    queue.call("set_secret", "api", "hunter2-hunter2")
    config = {"url": "https://example.com/x?key=hunter2", "auth": {"type": "bearer", "token": {"$secret": "api"}}}
    queue.endpoint("shop", config, protocol="http")
    queue.send("shop", {"iban": "DE02"})
    queue.bury(queue.send("shop", {"iban": "DE02"}))

    html = page(queue)

    assert "hunter2" not in html
    assert "DE02" not in html


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


def test_a_monitor_may_print_it(connect: Connect, db: psycopg.Connection[Any]) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    (html,) = connect("ulak_monitor").execute("select ulak.report()").fetchone()  # type: ignore[misc]

    assert "shop" in text(parsed(html))
