"""The sections of ulak.report() to work from: open circuits, dead letters, what waits until when, and what happened.

Attributes data-endpoint, data-letter, data-message, data-receiver and data-pattern are for a console that serves the
page and puts links there."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ulak.report import chart, wording
from ulak.report.markup import Child, Markup, tag
from ulak.report.parts import Column, Row, empty, listing, panel, table, task

# The spans of ulak.retry_schedule, and what stands over their columns.
SPANS = {
    "now": "now",
    "within a minute": "1 min",
    "within 5 minutes": "5 min",
    "within an hour": "1 h",
    "within a day": "24 h",
    "later": "later",
    "behind another of its ordering key": "behind its key",
}
NO_ERROR = "without an error"
# How many characters of a log entry are shown.
TOLD = 160
EVENT_MOODS = {
    "circuit.opened": "bad",
    "circuit.half_open": "warn",
    "circuit.closed": "good",
    "endpoint.disabled": "warn",
    "endpoint.enabled": "good",
    "maintenance.failed": "bad",
    "message.dead": "warn",
}


def circuits(rows: Sequence[Row], now: datetime.datetime) -> Markup | None:
    """Nothing where all are closed."""
    if not rows:
        return None
    return listing("Open circuits", [_circuit(row, now) for row in rows], "", "deliveries pause until a probe succeeds")


def _circuit(row: Row, now: datetime.datetime) -> Markup:
    probe = row["next_probe_at"] and (wording.time(row["next_probe_at"]) - now).total_seconds()
    if row["state"] == "half_open":
        said = "a probe is under way"
    elif probe is None or probe <= 0:
        said = "the next probe is due"
    else:
        said = f"next probe in {wording.duration(probe)}"
    return task(
        tag("b", row["endpoint"], data_endpoint=row["endpoint"]),
        row["host"] and tag("span", row["host"], class_="quiet"),
        tag("span", said, class_="pill bad"),
        tag("span", row["opened_at"] and f"opened {wording.ago(row['opened_at'], now)}", class_="quiet"),
        error=row["error"],
        command=row["command"],
    )


def causes(rows: Sequence[Row], now: datetime.datetime) -> Markup:
    most = max((row["letters"] for row in rows), default=0)
    items = [
        task(
            tag("b", row["endpoint"], data_endpoint=row["receiver"]),
            error=row["cause"] or NO_ERROR,
            amount=[
                chart.meter(row["letters"] / most, "failed"),
                tag("b", wording.exact(row["letters"]), class_="n"),
                tag("small", "last " + wording.ago(row["last_at"], now), class_="quiet"),
            ],
            command=row["command"],
            data_receiver=row["receiver"],
            data_pattern=row["receiver"] and row["pattern"],
        )
        for row in rows
    ]
    return listing(
        "Dead letters by cause", items, "No dead letter waits for a decision.", items and "the commands are dry runs"
    )


def letters(rows: Sequence[Row], now: datetime.datetime) -> Markup:
    items = [
        task(
            tag("b", row["id"], data_letter=row["command"] and row["id"]),
            tag("span", row["endpoint"]),
            tag("span", "message ", tag("span", row["message"], data_message=row["message"]), class_="quiet"),
            tag(
                "span",
                f"{row['attempts']} attempt{'' if row['attempts'] == 1 else 's'}, {wording.ago(row['failed_at'], now)}",
                class_="quiet",
            ),
            error=row["error"] or NO_ERROR,
            command=row["command"],
        )
        for row in rows
    ]
    return listing("Newest dead letters", items, "There are none.")


def schedule(rows: Sequence[Row], now: datetime.datetime) -> Markup:
    if not rows:
        return panel("Retry schedule", empty("Nothing waits."))
    used = [span for span in SPANS if any(span in row["spans"] for row in rows)]
    columns: list[Column] = [
        ("endpoint", "name", lambda row: tag("b", row["endpoint"], data_endpoint=row["endpoint"])),
        *((SPANS[span], "n", _waiting_until(span)) for span in used),
        (
            "next",
            "n",
            lambda row: (
                row["next_at"] and f"in {wording.duration((wording.time(row['next_at']) - now).total_seconds())}"
            ),
        ),
    ]
    return panel("Retry schedule", table(rows, columns), note="messages by when they are due")


def _waiting_until(span: str) -> Any:
    def cell(row: Row) -> str:
        found = row["spans"].get(span)
        if not found:
            return ""
        number = wording.exact(found["messages"])
        return f"~{number}" if found["is_rest"] else f"{number}+" if found["is_estimate"] else number

    return cell


def events(rows: Sequence[Row], now: datetime.datetime) -> Markup:
    items = [_event(row, now) for row in rows]
    return listing(
        "What happened", items, "The event log is empty.", items and "the newest of ulak.event_log", style="log"
    )


def _event(row: Row, now: datetime.datetime) -> Markup:
    told = ", ".join(_told(row["told"]))
    return tag(
        "li",
        tag("small", wording.ago(row["at"], now), class_="quiet", title=wording.day_and_clock(wording.time(row["at"]))),
        tag(
            "p",
            tag("span", row["event"], class_=f"pill {EVENT_MOODS.get(row['event'], 'calm')}"),
            row["entries"] > 1 and tag("b", f"{wording.exact(row['entries'])} times"),
            row["endpoint"] and tag("span", row["endpoint"]),
            row["message"] and tag("span", "message ", tag("span", row["message"], data_message=row["message"])),
            tag("span", f"by {row['actor']}", class_="quiet"),
            class_="facts",
        ),
        told and tag("p", told if len(told) <= TOLD else told[: TOLD - 1] + "\u2026", class_="error"),
    )


def _told(told: Mapping[str, Any]) -> Iterator[str]:
    """The change first, then the other details."""
    old, new = told.get("old"), told.get("new")
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                yield f"{key}: {_plain(old.get(key))} \u2192 {_plain(new.get(key))}"
    elif old is not None or new is not None:
        yield f"{_plain(old)} \u2192 {_plain(new)}"
    for key, value in (told.get("detail") or {}).items():
        yield f"{key.replace('_', ' ')}: {_plain(value)}"


def _plain(value: object) -> Child:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
