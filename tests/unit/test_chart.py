"""Charts: round scales, gaps where nothing is known, and tooltips."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.report import chart, wording
from ulak.report.chart import Series

START = datetime(2031, 3, 5, 10, 30, tzinfo=UTC)
TIMES = [START + timedelta(minutes=6 * i) for i in range(60)]


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_a_scale_starts_at_zero_reaches_the_most_and_has_few_steps(most: float) -> None:
    ticks = chart.ticks(most)

    assert ticks[0] == 0
    assert ticks[-1] >= most * 0.999999
    assert ticks[-2] < most
    assert 3 <= len(ticks) <= 7


def test_a_scale_of_nothing_is_still_one() -> None:
    assert chart.ticks(0) == [0, 1]


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_bars_are_stacked_from_the_bottom() -> None:
    one = [4.0] + [0.0] * 59
    svg = parse(chart.bars("x", TIMES, [Series("a", "delivered", one), Series("b", "failed", one)], wording.number))

    lower, upper = (
        next(each for each in svg.iter("rect") if each.get("class") == name) for name in ("delivered", "failed")
    )

    assert float(upper.attrib["y"]) + float(upper.attrib["height"]) == pytest.approx(float(lower.attrib["y"]), abs=0.11)
    assert lower.attrib["height"] == upper.attrib["height"]


def test_each_step_says_what_it_shows() -> None:
    svg = parse(chart.lines("x", TIMES[:2], [Series("p95", "p95", [120.0, None])], wording.milliseconds))

    assert [each.text for each in svg.iter("title")] == ["10:30 UTC: p95 120 ms", "10:36 UTC: p95 none"]


def test_a_line_has_a_gap_where_nothing_is_known() -> None:
    values = [1.0, 2.0, None, 3.0, 4.0, None, 5.0]
    svg = parse(chart.lines("x", TIMES[:7], [Series("p95", "p95", values)], wording.number))

    assert len([each for each in svg.iter("path") if each.get("class") == "line p95"]) == 2
    assert len(list(svg.iter("circle"))) == 1


def test_hours_are_labelled_where_there_is_room() -> None:
    svg = parse(chart.lines("x", TIMES, [Series("a", "p95", [1.0] * 60)], wording.number))

    labels = [each.text for each in svg.iter("text") if ":" in str(each.text)]

    assert labels == ["11:00", "12:00", "13:00", "14:00", "15:00", "16:00"]


@given(st.lists(st.floats(min_value=0, max_value=1e9), max_size=60))
def test_a_sparkline_fits_its_box(values: list[float]) -> None:
    svg = parse(chart.sparkline("x", values))

    drawn = "".join(each.attrib["d"] for each in svg.iter("path"))
    heights = [float(each) for each in re.findall(r"v-([0-9.]+)", drawn)]

    assert len(heights) == len(values)
    assert all(0 < height <= 26 for height in heights)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=60))
def test_failures_in_a_sparkline_stand_upon_the_deliveries_and_fit_its_box(values: list[tuple[int, int]]) -> None:
    svg = parse(chart.sparkline("x", [each[0] for each in values], [each[1] for each in values]))

    paths = {
        each.attrib["class"]: re.findall(r"M[0-9.]+ ([0-9.]+)v-([0-9.]+)", each.attrib["d"])
        for each in svg.iter("path")
    }

    assert len(paths.get("spark failed", [])) == sum(failed > 0 for _, failed in values)
    for strokes in paths.values():
        assert all(-0.1 <= float(foot) - float(high) <= float(foot) <= 26 for foot, high in strokes)


def test_few_bars_stay_slender() -> None:
    svg = parse(chart.bars("x", TIMES[:2], [Series("a", "delivered", [1.0, 1.0])], wording.number))

    assert {each.attrib["width"] for each in svg.iter("rect") if each.get("class") == "delivered"} == {"24.0"}


def test_a_chart_for_a_phone_has_fewer_labels() -> None:
    svg = parse(chart.lines("x", TIMES, [Series("a", "p95", [1.0] * 60)], wording.number, width=chart.PHONE))

    assert [each.text for each in svg.iter("text") if ":" in str(each.text)] == ["12:00", "14:00", "16:00"]
    assert svg.attrib["class"] == "chart phone"


def test_a_short_span_is_labelled_in_minutes() -> None:
    times = [START + timedelta(minutes=i) for i in range(20)]
    svg = parse(chart.lines("x", times, [Series("a", "p95", [1.0] * 20)], wording.number))

    assert [each.text for each in svg.iter("text") if ":" in str(each.text)] == ["10:35", "10:40", "10:45"]


def test_a_sparkline_shows_nothing_in_another_colour_than_little() -> None:
    svg = parse(chart.sparkline("x", [0, 1, 1000]))

    bars = {each.attrib["class"]: each.attrib["d"].count("M") for each in svg.iter("path")}

    assert bars == {"spark": 2, "spark none": 1}
