"""HTML and SVG as values: whatever isn't markup already is escaped, and every element is closed."""

from __future__ import annotations

import html
from collections.abc import Iterable

from ulak.safety import text

VOID = frozenset(("meta", "br", "hr", "img", "rect", "line", "path", "circle", "polyline", "polygon"))


class Markup(str):
    """Text that was built here and needs no escaping."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. None and False leave an attribute or a child out; class_ is class, and _ stands for - in a name."""
    head = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            head += f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
    body = join(children)
    if not body and name in VOID:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{body}</{name}>")


def join(children: Child) -> Markup:
    if isinstance(children, Markup):
        return children
    if children is None or children is False:
        return Markup()
    if isinstance(children, (str, int, float)):
        return Markup(_text(children))
    return Markup("".join([join(child) for child in children]))


def _text(value: object) -> str:
    """Escaped, and without what XML can't hold, whatever was stored. Coordinates with one decimal are fine enough, and
    a page of them is half as long."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value) if isinstance(value, int) else html.escape(text.storable(str(value)))
