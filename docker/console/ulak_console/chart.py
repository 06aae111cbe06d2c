"""Bars as SVG attributes: a step each, stacked, with the largest and the first and last times beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 600, 100


class Bar(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    kind: str
    said: str


class Chart(NamedTuple):
    title: str
    bars: Sequence[Bar]
    most: float
    first: Any
    last: Any


def of(title: str, kinds: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Nothing where nothing is known."""
    if not rows:
        return None
    most = max(sum(row[kind] or 0 for kind in kinds) for row in rows)
    if not most:
        return None
    width = WIDTH / len(rows)
    bars = []
    for place, row in enumerate(rows):
        top = float(HEIGHT)
        said = f"{row['at']:%H:%M} " + ", ".join(f"{row[kind] or 0:,.0f} {kind}" for kind in kinds)
        for kind in kinds:
            height = HEIGHT * (row[kind] or 0) / most
            top -= height
            if height:
                bars.append(
                    Bar(round(place * width, 1), round(top, 1), round(width - 1, 1), round(height, 1), kind, said)
                )
    return Chart(title, bars, most, rows[0]["at"], rows[-1]["at"])
