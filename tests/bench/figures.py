"""What a run found: numbers with their units, what is asked of them, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# How a number of each unit is written. Of a rate, and of a part of one, more is better; of everything else less.
RATE = "/s"
PART_OF = "of"
UNITS = {
    RATE: "{:,.0f}/s",
    PART_OF: "{:.2f} of",
    "us": "{:,.{}f} us",
    "ms": "{:,.{}f} ms",
    "s": "{:,.{}f} s",
    "rows": "{:,.0f} rows",
    "bytes": "{:,.0f} bytes",
    "times": "{:.2f}x",
    "share": "{:.1%}",
    "exponent": "{:.2f}",
}


def shown(value: float, unit: str) -> str:
    """Times with three digits or so."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return UNITS[unit].format(value, digits)


@dataclass(frozen=True)
class Quantity:
    value: float
    unit: str
    # Follows the number, such as "of processor".
    what: str = ""
    # What the project promises; missing it fails the run.
    required: float | None = None
    # What it strives for.
    aim: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.unit in (RATE, PART_OF)

    def reaches(self, limit: float) -> bool:
        return self.value >= limit if self.more_is_better else self.value <= limit

    @property
    def is_kept(self) -> bool:
        return self.required is None or self.reaches(self.required)

    @property
    def is_reached(self) -> bool:
        return self.aim is None or self.reaches(self.aim)

    def __str__(self) -> str:
        return f"{shown(self.value, self.unit)} {self.what}".rstrip()

    def goals(self) -> str:
        sign = ">=" if self.more_is_better else "<="
        required = "" if self.required is None else f"{sign} {self._goal(self.required)}"
        aim = "" if self.aim is None else f"aim {sign} {self._goal(self.aim)}"
        return ", ".join(filter(None, (required, aim)))

    def _goal(self, limit: float) -> str:
        return shown(limit, self.unit).removesuffix(f" {PART_OF}")


class Figure:
    """One line of the table. Headlines are those that README shows."""

    def __init__(self, name: str, *quantities: Quantity, headline: bool = False) -> None:
        self.name = name
        self.quantities = quantities
        self.headline = headline

    @property
    def is_kept(self) -> bool:
        return all(each.is_kept for each in self.quantities)

    def cells(self) -> tuple[str, str, str, str]:
        """Its name, what was measured, what was asked, and whether that holds."""
        goals = "; ".join(filter(None, (each.goals() for each in self.quantities)))
        holds = "" if not goals else "yes" if all(each.is_reached for each in self.quantities) else "not the aim"
        return self.name, ", ".join(map(str, self.quantities)), goals, holds if self.is_kept else "NO"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "headline": self.headline,
            "quantities": [
                {
                    "value": each.value,
                    "unit": each.unit,
                    "what": each.what,
                    **({} if each.required is None else {"required": each.required, "kept": each.is_kept}),
                    **({} if each.aim is None else {"aim": each.aim, "reached": each.is_reached}),
                }
                for each in self.quantities
            ],
        }


HEAD = ("measured", "asked", "holds")


def plain(part: str, figures: Iterable[Figure]) -> str:
    return table((part, *HEAD), [figure.cells() for figure in figures])


def markdown(parts: dict[str, list[Figure]]) -> str:
    """The headlines, as README shows them."""
    rows = [
        (f"`{part}`: {figure.name}", *figure.cells()[1:])
        for part, figures in parts.items()
        for figure in figures
        if figure.headline
    ]
    head: list[Sequence[str]] = [("`make bench ARGS=...`", *HEAD), ["---"] * 4]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [*head, *rows])


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
