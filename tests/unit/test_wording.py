"""Numbers, sizes and durations as people read them."""

from __future__ import annotations

import pytest
from ulak.report import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.04, "0.04"),
        (0.25, "0.25"),
        (1.25, "1.25"),
        (7, "7"),
        (99.5, "99.5"),
        (123.4, "123"),
        (12345, "12,345"),
        (123456, "123k"),
        (1234567, "1.23M"),
        (2.5e9, "2.5G"),
    ],
)
def test_numbers_have_about_three_digits(value: float | None, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 s"),
        (12.3, "12 s"),
        (61, "1 m 1 s"),
        (725, "12 m"),
        (3600, "1 h"),
        (5000, "1 h 23 m"),
        (90000, "1 d 1 h"),
        (-5, "0.0 s"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


def test_latencies_and_sizes() -> None:
    assert [wording.milliseconds(value) for value in (None, 0, 0.424, 5.0, 12.5, 424.2, 2500)] == [
        "",
        "0",
        "0.42 ms",
        "5 ms",
        "12.5 ms",
        "424 ms",
        "2.5 s",
    ]
    assert [wording.size(value) for value in (12, 8192, 81920, 5 << 20, 3 << 40)] == [
        "12 B",
        "8.0 kB",
        "80 kB",
        "5.0 MB",
        "3.0 TB",
    ]


def test_any_spelling_of_a_timestamp_is_understood() -> None:
    assert wording.clock(wording.time("2031-03-05T12:30:00.19642+02:00")) == "10:30"
    assert wording.day_and_clock(wording.time("2031-03-05T12:30:00+00:00")) == "5 March 2031, 12:30 UTC"
