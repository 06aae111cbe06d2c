"""The building blocks of the sections of ulak.report()."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ulak.report.markup import Child, Markup, tag

Row = Mapping[str, Any]
# Title, class and what stands in a row.
Column = tuple[str, str, Callable[[Row], Child]]


def panel(title: str, content: Child, aside: Child = None, note: Child = None) -> Markup:
    return tag(
        "section",
        tag("div", tag("h2", title, note and tag("span", note, class_="quiet")), aside, class_="title"),
        content,
        class_="panel",
    )


def legend(*names: tuple[str, str]) -> Markup:
    return tag("p", (tag("span", tag("i", class_=f"key {style}"), text) for style, text in names), class_="legend")


def table(rows: Sequence[Row], columns: Sequence[Column]) -> Markup:
    """On a phone each row becomes a card, and each cell says what it is by itself."""
    head = tag("tr", (tag("th", title, class_=style or None) for title, style, _ in columns))
    body = (
        tag(
            "tr",
            (tag("td", cell(row), class_=style or None, data_label=title or None) for title, style, cell in columns),
        )
        for row in rows
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")


def empty(text: str) -> Markup:
    return tag("p", text, class_="empty")


def listing(title: str, items: Sequence[Markup], nothing: str, note: Child = None, style: str = "tasks") -> Markup:
    return panel(title, tag("ul", items, class_=style) if items else empty(nothing), note=note)


def task(*facts: Child, error: str | None, command: str | None, amount: Child = None, **attributes: object) -> Markup:
    """What is wrong, and the SQL to run. There is none for dead letters of an endpoint that was dropped."""
    return tag(
        "li",
        tag("p", *facts, class_="facts"),
        error and tag("p", error, class_="error"),
        amount and tag("p", amount, class_="amount"),
        tag("pre", tag("code", command))
        if command
        else tag("p", "Its endpoint was dropped: send the payload to another one.", class_="quiet"),
        **attributes,
    )
