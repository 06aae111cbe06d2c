"""Numbers, sizes, durations and times as people read them."""

from __future__ import annotations

import datetime


def number(value: float | None) -> str:
    """Three digits or so: 7, 0.4, 12,345, 1.24M."""
    if value is None:
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.3g}{letter}" if value / unit < 1000 else f"{value / unit:,.0f}{letter}"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"


def exact(value: float) -> str:
    return f"{value:,.0f}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "0"
    if value < 1000:
        return f"{value:.2g} ms" if value < 10 else f"{value:.3g} ms"
    return duration(value / 1000)


def duration(seconds: float | None) -> str:
    """The two largest units."""
    if seconds is None:
        return ""
    seconds = max(seconds, 0)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest} s" if rest and minutes < 10 else f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} m" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def time(text: str) -> datetime.datetime:
    """A timestamptz as JSON has it."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)


def ago(text: str | None, now: datetime.datetime) -> str:
    return "never" if text is None else duration((now - time(text)).total_seconds()) + " ago"


def clock(moment: datetime.datetime) -> str:
    return f"{moment.hour:02}:{moment.minute:02}"


def day_and_clock(moment: datetime.datetime) -> str:
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
