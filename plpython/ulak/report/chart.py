"""Charts as inline SVG: bars, lines and sparklines, coloured by the page's style."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ulak.report import wording
from ulak.report.markup import Markup, tag

Values = Sequence[float | None]

# A chart is drawn twice, since letters in a drawing shrink with it: for a desk, and for a phone.
PHONE = 340
WIDEST_BAR = 24


class Series(NamedTuple):
    name: str
    # The class that gives it its colour.
    style: str
    values: Values


class Frame(NamedTuple):
    """Where the data goes: the plot's edges, and the value at its top."""

    width: float
    height: float
    most: float
    left: float = 52
    right: float = 6
    top: float = 10
    bottom: float = 24

    def x(self, place: float) -> float:
        """place from 0 to 1"""
        return self.left + (self.width - self.left - self.right) * place

    def y(self, value: float) -> float:
        share = value / self.most if self.most else 0
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share


def bars(
    label: str,
    times: Sequence[datetime.datetime],
    series: Sequence[Series],
    tell: Callable[[float], str],
    width: float = 1120,
    height: float = 220,
) -> Markup:
    """Stacked, the first at the bottom. Each place says its values when pointed at. A few bars stay slender."""
    sums = [sum(each.values[i] or 0 for each in series) for i in range(len(times))]
    frame = Frame(width, height, ticks(max(sums, default=0))[-1])
    step = frame.x(1 / len(times)) - frame.x(0)
    wide = min(step * 0.76, WIDEST_BAR)
    columns = []
    for i, moment in enumerate(times):
        below = 0.0
        parts = []
        for each in series:
            value = each.values[i] or 0
            if value:
                # A value above 0 is at least a hairline high.
                top, foot = frame.y(below + value), frame.y(below)
                parts.append(
                    _bar(frame.x((i + 0.5) / len(times)) - wide / 2, min(top, foot - 1), wide, foot, each.style)
                )
                below += value
        columns.append(_column(frame, i, len(times), _said(moment, series, i, tell), *parts))
    return _chart(label, frame, times, tell, *columns)


def lines(
    label: str,
    times: Sequence[datetime.datetime],
    series: Sequence[Series],
    tell: Callable[[float], str],
    least: float = 0,
    width: float = 552,
    height: float = 200,
) -> Markup:
    """The last series is filled down to the axis. Where a value is missing the line has a gap. The scale ends no lower
    than at `least`."""
    known = (value for each in series for value in each.values if value is not None)
    frame = Frame(width, height, ticks(max(least, max(known, default=0)))[-1])
    drawn = []
    for number, each in enumerate(reversed(series)):
        for run in _runs(each.values):
            points = [(frame.x((i + 0.5) / len(times)), frame.y(value)) for i, value in run]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            if number == 0:
                foot = frame.y(0)
                drawn.append(
                    tag(
                        "path",
                        class_=f"area {each.style}",
                        d=f"{path}L{points[-1][0]:.1f} {foot:.1f}L{points[0][0]:.1f} {foot:.1f}Z",
                    )
                )
            if len(points) == 1:
                drawn.append(tag("circle", class_=f"dot {each.style}", cx=points[0][0], cy=points[0][1], r=2.5))
            else:
                drawn.append(tag("path", class_=f"line {each.style}", d=path))
    columns = [_column(frame, i, len(times), _said(moment, series, i, tell)) for i, moment in enumerate(times)]
    return _chart(label, frame, times, tell, *drawn, *columns)


def sparkline(
    label: str, values: Sequence[float], failed: Sequence[float] = (), width: float = 120, height: float = 26
) -> Markup:
    """Failed attempts are stacked on delivered ones. One path for all bars: a page has a thousand of them."""
    sums = [value + (failed[i] if i < len(failed) else 0) for i, value in enumerate(values)]
    most = max(sums, default=0)
    step = width / max(len(sums), 1)
    bars, above, gaps = "", "", ""
    for i, (value, total) in enumerate(zip(values, sums, strict=True)):
        high = max(1.5, (height - 2) * total / most) if total else 1.0
        lower = high * value / total if total else high
        x = i * step + step * 0.15
        if not total:
            gaps += _stroke(x, height, high, step * 0.7)
        elif value:
            bars += _stroke(x, height, lower, step * 0.7)
        if total > value:
            # However few have failed: it can be seen.
            red = min(high, max(high - lower, 1.5))
            above += _stroke(x, height - high + red, red, step * 0.7)
    return tag(
        "svg",
        bars and tag("path", class_="spark", d=bars),
        above and tag("path", class_="spark failed", d=above),
        gaps and tag("path", class_="spark none", d=gaps),
        tag("title", label),
        class_="sparkline",
        preserveAspectRatio="none",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def _stroke(x: float, foot: float, high: float, wide: float) -> str:
    return f"M{x:.1f} {foot:.1f}v-{high:.1f}h{wide:.1f}v{high:.1f}z"


def meter(share: float, style: str) -> Markup:
    """A bar in a row of a table; at least visible if it isn't nothing. A drawing, since a page under a strict policy
    may have no style in an attribute."""
    wide = 0 if share <= 0 else max(1.5, min(share, 1) * 100)
    return tag("svg", tag("rect", class_=style, width=f"{wide:.1f}%", height="100%", rx=2.5), class_="meter")


def ticks(most: float) -> list[float]:
    """From 0 to the first round number that isn't below `most`, in three to six steps."""
    if most <= 0:
        return [0, 1]
    raw = most / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _chart(
    label: str, frame: Frame, times: Sequence[datetime.datetime], tell: Callable[[float], str], *drawn: Markup
) -> Markup:
    grid = []
    for value in ticks(frame.most):
        y = frame.y(value)
        grid.append(
            tag("line", class_="grid" if value else "axis", x1=frame.left, x2=frame.width - frame.right, y1=y, y2=y)
        )
        grid.append(tag("text", tell(value), class_="tick", x=frame.left - 8, y=y + 3.5, text_anchor="end"))
    for place, moment in _hours(times, labels=int(min(8, frame.width // 65))):
        grid.append(
            tag(
                "text", wording.clock(moment), class_="tick", x=frame.x(place), y=frame.height - 6, text_anchor="middle"
            )
        )
    return tag(
        "svg",
        *grid,
        *drawn,
        class_="chart phone" if frame.width <= PHONE else "chart desk",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
        aria_label=label,
    )


def _hours(times: Sequence[datetime.datetime], labels: int) -> Iterator[tuple[float, datetime.datetime]]:
    """Full hours, or every second, third and so on, or parts of an hour, that leave room for this many labels."""
    if len(times) < 2:
        return
    step = (times[1] - times[0]).total_seconds()
    span = step * len(times)
    minutes = (5, 10, 15, 30, 60, 120, 180, 240, 360, 720, 1440, 2880, 5760)
    every = next((each for each in minutes if span / 60 / each <= labels), minutes[-1]) * 60
    moment = math.ceil(times[0].timestamp() / every) * every
    while moment < times[0].timestamp() + span:
        place = (moment - times[0].timestamp()) / span
        if 0.015 < place < 0.985:
            yield place, datetime.datetime.fromtimestamp(moment, datetime.UTC)
        moment += every


def _column(frame: Frame, place: int, count: int, said: str, *bars: Markup) -> Markup:
    """The bar or point of one time, and the area that shows its value when pointed at."""
    area = _bar(frame.x(place / count), frame.top, frame.x(1 / count) - frame.x(0), frame.y(0), "touch", round=False)
    return Markup(f'<g class="column">{tag("title", said)}{area}{"".join(bars)}</g>')


def _bar(x: float, top: float, width: float, foot: float, style: str, round: bool = True) -> Markup:
    """Numbers and a name of ours need no escaping: a page has hundreds of these."""
    corner = f' rx="{min(1.5, width / 3):.1f}"' if round else ""
    return Markup(
        f'<rect class="{style}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{foot - top:.1f}"{corner}/>'
    )


def _said(moment: datetime.datetime, series: Sequence[Series], place: int, tell: Callable[[float], str]) -> str:
    found = [(each.name, each.values[place]) for each in series]
    return f"{wording.clock(moment)} UTC: " + ", ".join(
        f"{name} {'none' if value is None else tell(value)}" for name, value in found
    )


def _runs(values: Values) -> Iterator[list[tuple[int, float]]]:
    run: list[tuple[int, float]] = []
    for i, value in enumerate(values):
        if value is not None:
            run.append((i, value))
        elif run:
            yield run
            run = []
    if run:
        yield run
