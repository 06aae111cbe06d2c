"""Markup: whatever isn't markup already is escaped, and every element is closed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st
from ulak.report.markup import Markup, join, tag


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "<b>&\"'", tag("b", 1)) == "<p>&lt;b&gt;&amp;&quot;&#x27;<b>1</b></p>"


def test_attributes_are_escaped_and_spelled() -> None:
    assert tag("i", class_="a", aria_label='"><script>') == '<i class="a" aria-label="&quot;&gt;&lt;script&gt;"></i>'


def test_what_is_none_or_false_is_left_out() -> None:
    assert tag("p", None, False, ["a", None, ["b"]], title=None, open=False) == "<p>ab</p>"


def test_void_elements_close_themselves() -> None:
    assert tag("br") == "<br/>"
    assert tag("div") == "<div></div>"


def test_coordinates_are_short() -> None:
    assert tag("rect", x=1.25, y=2.0, width=3) == '<rect x="1.2" y="2" width="3"/>'


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="￾￿")))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    element = ElementTree.fromstring(tag("p", text, tag("i", title=text)))

    assert (element.text or "") == text
    assert element[0].attrib["title"] == text


def test_joined_markup_stays_markup() -> None:
    assert isinstance(join(["<", tag("br")]), Markup)
    assert join(["<", tag("br")]) == "&lt;<br/>"
