"""Values that must not be shown."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulak.safety.mask import MASK, SHORTEST, Mask

# An asterisk in a secret could be one of the mask's own.
SECRETS = st.text(st.characters(blacklist_characters="*", blacklist_categories=("Cs",)), min_size=SHORTEST, max_size=40)


@given(st.lists(SECRETS, min_size=1, max_size=5), st.data())
def test_no_value_is_left_in_any_text(values: list[str], data: st.DataObject) -> None:
    pieces = st.lists(st.one_of(st.sampled_from(values), st.text(max_size=10)), max_size=8)
    text = "".join(data.draw(pieces))

    hidden = Mask(values).hide(text)

    assert not [value for value in values if value in hidden]


@given(SECRETS)
def test_a_value_is_found_in_the_encodings_of_receivers(value: str) -> None:
    mask = Mask([value])

    for encoded in (
        quote(value),
        quote(value, safe=""),
        quote_plus(value),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        html.escape(value),
        b64encode(value.encode()).decode(),
        value.encode().decode("latin-1"),
    ):
        assert mask.hide(f"<<{encoded}>>").rstrip("=>") == f"<<{MASK}"


@given(SECRETS, st.text("abc ", max_size=20), st.integers(min_value=SHORTEST))
def test_the_beginning_of_a_value_at_the_end_of_a_cut_text_is_hidden(value: str, text: str, length: int) -> None:
    shown = value[: min(length, len(value))]

    hidden = Mask([value]).hide(text + shown, is_cut=True)

    assert not hidden.endswith(shown)


@given(st.text())
def test_a_text_without_a_value_stays_as_it_is(text: str) -> None:
    assert Mask(["a value that is nowhere", "abc", ""]).hide(text) == text


@pytest.mark.parametrize("value", ["", "a", "abc"])
def test_a_value_too_short_to_protect_anything_does_not_destroy_text(value: str) -> None:
    assert Mask([value]).hide("abc and a cab") == "abc and a cab"


def test_values_that_overlap_are_hidden_as_one() -> None:
    assert Mask(["abc123", "123xyz"]).hide("<abc123xyz>") == f"<{MASK}>"


def test_others_are_hidden_for_one_text_only() -> None:
    mask = Mask(["first-value"])

    assert mask.hide("first-value and other-value", ["other-value"]) == f"{MASK} and {MASK}"
    assert mask.hide("other-value") == "other-value"
