"""Text from outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.safety import text

ANYTHING = st.text(st.characters())
# Few among all characters: chance would hardly find them.
REFUSED = ["\0", "\x08", "\x1b", "\ud800", "\udfff", "\ufffe", "\uffff"]
# As Python calls what PostgreSQL holds in each; where there is no codec, it is ASCII.
CODECS = {"UTF8": "utf-8", "LATIN1": "latin-1", "WIN1252": "cp1252", "EUC_JP": "euc_jp"}


@given(ANYTHING, st.sampled_from([*CODECS, "SQL_ASCII", "EUC_TW", "MULE_INTERNAL"]))
def test_anything_becomes_storable(given: str, encoding: str) -> None:
    stored = text.storable(given, encoding)

    stored.encode(CODECS.get(encoding, "ascii"))
    assert text.storable(stored, encoding) == stored


@pytest.mark.parametrize("refused", REFUSED)
def test_what_the_database_or_xml_refuses_is_replaced(refused: str) -> None:
    assert text.storable(f"a{refused}b") == "a\ufffdb"


@given(ANYTHING)
def test_anything_becomes_one_short_line(given: str) -> None:
    line = text.line(given, 50)

    assert len(line) <= 53
    assert "\n" not in line and "\0" not in line and "\x1b" not in line
    assert line == line.strip()
    line.encode()


@pytest.mark.parametrize(
    ("encoding", "stored"), [("UTF8", "ü €日"), ("LATIN1", "ü ??"), ("WIN1252", "ü €?"), ("SQL_ASCII", "? ??")]
)
def test_what_a_database_can_hold_is_kept(encoding: str, stored: str) -> None:
    assert text.storable("ü €日", encoding) == stored


def test_the_direction_of_a_text_is_not_turned() -> None:
    assert text.line("a\u202eb\u2066c") == "a b c"
