"""Every shape of Retry-After."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.transports.http import retry_after

# Sun, 06 Nov 1994 08:49:37 GMT
NOW = 784111777


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0),
        ("120", 120),
        (" 7 ", 7),
        ("0007", 7),
        ("86401", 86400),
        ("9" * 5000, 86400),
        ("0" * 5000, 0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ("Sun, 06 Nov 1994 08:50:37 GMT", 60),
        ("Sunday, 06-Nov-94 08:50:37 GMT", 60),
        ("Sun Nov  6 08:50:37 1994", 60),
        ("Sun, 06 Nov 1994 10:50:37 +0200", 60),
        ("Sat, 05 Nov 1994 08:49:37 GMT", 0),
        ("Sun, 06 Nov 2094 08:49:37 GMT", 86400),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("1e3", None),
        ("+5", None),
        ("١٢", None),
        ("soon", None),
        ("tomorrow at noon", None),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 99999 08:49:37 GMT", None),
    ],
)
def test_seconds_and_dates_count_and_nonsense_does_not(value: str, expected: int | None) -> None:
    assert retry_after.seconds(value, NOW) == expected


def test_a_date_is_never_undercut() -> None:
    assert retry_after.seconds("Sun, 06 Nov 1994 08:49:40 GMT", NOW + 0.5) == 3


@given(st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d{1,6} [A-Z][a-z]{2} \d{1,6} \d{1,4}:\d{1,4}:\d{1,4} \S{0,9}"))
def test_no_value_is_an_error_or_outside_a_day(value: str) -> None:
    found = retry_after.seconds(value, NOW)

    assert found is None or 0 <= found <= 86400
