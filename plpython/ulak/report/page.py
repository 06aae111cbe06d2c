"""ulak.report(): one page about the last hours, that needs nothing but a browser."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ulak.report import chart, tasks, wording
from ulak.report.chart import Series
from ulak.report.markup import Child, Markup, tag
from ulak.report.parts import Column, Row, empty, legend, panel, table
from ulak.report.style import STYLE

MOODS = {"flowing": "good", "late": "warn", "failing": "warn", "half_open": "bad", "open": "bad"}
SEVERITIES = {"critical": "bad", "warning": "warn", "info": "calm", "ok": "good"}
WORKER_MOODS = {"running": "good", "lost": "bad", "leaving": "warn"}
# Findings of one kind that are shown at once.
ALIKE = 3
STEP_MOODS = {"ok": "good", "failed": "bad", "late": "warn", "behind": "warn"}


def render(data: Row) -> str:
    """The page. `data` is what ulak_private.report_data() gathers."""
    now = wording.time(data["now"])
    body = tag(
        "main",
        _head(data, now),
        _verdict(data),
        _tiles(data, now),
        tasks.circuits(data["circuits"], now),
        _traffic(data),
        _endpoints(data, now),
        tag(
            "div",
            tag(
                "div",
                tasks.causes(data["dead"], now),
                tasks.schedule(data["schedule"], now),
                class_="stack",
            ),
            tasks.letters(data["letters"], now),
            class_="pair",
        ),
        tag(
            "div",
            tasks.events(data["events"], now),
            tag("div", _workers(data, now), _maintenance(data, now), _partitions(data), class_="stack"),
            class_="pair",
        ),
        tag("footer", f"ulak {data['version']} on PostgreSQL {data['server']}. All times are UTC."),
    )
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"ulak: {data['database']}, {wording.day_and_clock(now)}"),
            tag("style", Markup(STYLE)),
        ),
        tag("body", body),
        lang="en",
    )
    # The signs of the states aren't in every database's encoding; references to them are.
    return f"<!DOCTYPE html>\n{page}\n".encode("ascii", "xmlcharrefreplace").decode()


def _head(data: Row, now: datetime.datetime) -> Markup:
    hours = data["hours"]
    return tag(
        "header",
        tag(
            "h1",
            tag(
                "svg",
                tag("path", d="M2 12.5 22 3 15.5 21l-4-7z"),
                tag("path", class_="fold", d="M22 3 11.5 14"),
                class_="mark",
                viewBox="0 0 24 24",
                aria_hidden="true",
            ),
            "ulak",
            tag("span", data["database"], class_="database"),
        ),
        tag(
            "p",
            f"The last {'hour' if hours == 1 else f'{hours} hours'} until ",
            tag("time", wording.day_and_clock(now), datetime=now.isoformat()),
            class_="quiet",
        ),
    )


def _verdict(data: Row) -> Markup:
    findings = [each for each in data["findings"] if each["severity"] != "ok"]
    if not findings:
        return tag(
            "section", tag("h2", "All is well"), tag("p", "The doctor found nothing wrong."), class_="verdict good"
        )
    worst = SEVERITIES[findings[0]["severity"]]
    counted = [
        f"{count} {many if count > 1 else one}"
        for severity, one, many in (
            ("critical", "critical", "critical"),
            ("warning", "warning", "warnings"),
            ("info", "note", "notes"),
        )
        if (count := sum(each["severity"] == severity for each in findings))
    ]
    return tag(
        "section",
        tag(
            "h2",
            "Nothing urgent" if worst == "calm" else "Needs attention",
            tag("span", ", ".join(counted), class_="quiet"),
        ),
        tag("ul", _findings(findings), class_="findings"),
        class_=f"verdict {worst}",
    )


def _findings(findings: Sequence[Row]) -> Iterator[Markup]:
    """Only a few findings per check, with the others folded away, so that every kind of problem is seen."""
    for _, group in itertools.groupby(findings, lambda each: (each["severity"], each["check_name"])):
        alike = list(group)
        shown = len(alike) if len(alike) <= ALIKE + 1 else ALIKE
        yield from (_finding(each, is_open=each["severity"] == "critical") for each in alike[:shown])
        if rest := alike[shown:]:
            yield tag(
                "li",
                tag(
                    "details",
                    tag("summary", tag("span", f"and {len(rest)} more like these", class_="more")),
                    tag("ul", (_finding(each, is_open=False) for each in rest), class_="findings"),
                ),
            )


def _finding(finding: Row, is_open: bool) -> Markup:
    said = [
        tag("span", finding["check_name"], class_=f"pill {SEVERITIES[finding['severity']]}"),
        tag("span", finding["finding"]),
    ]
    if not finding["fix"]:
        return tag("li", tag("p", *said))
    return tag(
        "li",
        tag(
            "details",
            tag("summary", *said),
            tag("pre", tag("code", finding["fix"])),
            open=is_open and "open",
        ),
    )


def _tiles(data: Row, now: datetime.datetime) -> Markup:
    steps, totals = data["traffic"], data["totals"]
    delivered = sum(each["delivered"] for each in steps)
    failed = sum(each["failed"] for each in steps)
    due = totals["due_since"]
    late = (now - wording.time(due)).total_seconds() if due else None
    p95 = [each["p95_ms"] for each in steps if each["p95_ms"] is not None]
    alive = sum(each["state"] in ("running", "leaving") for each in data["workers"])
    dead, rate = totals["dead"], totals["per_second"]
    share = 100 * failed / (delivered + failed) if delivered + failed else None
    return tag(
        "section",
        _tile(
            "Delivered",
            wording.number(delivered),
            f"{wording.number(rate)} a second now" if rate else "none right now",
        ),
        _tile(
            "Failed attempts",
            "none" if not failed else f"{share:.1f}%",
            f"{wording.number(failed)} of {wording.number(delivered + failed)}",
            "bad" if share and share >= 20 else "warn" if share and share >= 5 else None,
        ),
        _tile("Latency, p95", wording.milliseconds(p95[-1] if p95 else None) or "no data", "of the last requests"),
        _tile(
            "Waiting",
            ("~" if totals["is_estimate"] else "") + wording.number(totals["waiting"]),
            f"oldest due for {wording.duration(late)}" if late else "nothing is due",
            "bad" if late and late > 3600 else "warn" if late and late > 60 else None,
        ),
        _tile("Dead letters", wording.number(dead), "not redriven", "warn" if dead else None),
        _tile("Workers", str(alive), "alive", None if alive else "bad"),
        class_="tiles",
    )


def _tile(name: str, value: str, note: str, mood: str | None = None) -> Markup:
    return tag(
        "div",
        tag("h3", name),
        tag("p", value, class_="value"),
        tag("p", note, class_="quiet"),
        class_=f"tile {mood or ''}".strip(),
    )


def _traffic(data: Row) -> Child:
    steps: Sequence[Row] = data["traffic"]
    times = [wording.time(each["at"]) for each in steps]
    per_second = [[each[name] / each["seconds"] for each in steps] for name in ("delivered", "failed")]
    throughput = partial(
        chart.bars,
        "Deliveries and failed attempts per second",
        times,
        [Series("delivered", "delivered", per_second[0]), Series("failed", "failed", per_second[1])],
        wording.number,
    )
    latency = partial(
        chart.lines,
        "Latency of requests in milliseconds",
        times,
        [Series(name, name, [each[f"{name}_ms"] for each in steps]) for name in ("p95", "p50")],
        wording.milliseconds,
    )
    backlog = partial(
        chart.lines,
        "Messages that wait",
        times,
        [Series("waiting", "waiting", [each["waiting"] for each in steps])],
        wording.number,
        # There are no halves of messages.
        least=4,
    )
    return [
        panel(
            "Throughput",
            _twice(throughput, 190),
            legend(("delivered", "delivered"), ("failed", "failed attempts")),
            # The axis is no longer than what is known.
            f"messages a second since {wording.clock(times[0])}",
        ),
        tag(
            "div",
            panel("Latency", _twice(latency, 180), legend(("p50", "p50"), ("p95", "p95")), "from request to answer"),
            panel("Backlog", _twice(backlog, 180), legend(("waiting", "waiting")), "messages, all endpoints"),
            class_="pair",
        ),
    ]


def _twice(draw: Callable[..., Markup], height: float) -> list[Markup]:
    """For a desk and for a phone: the style shows one of them."""
    return [draw(), draw(width=chart.PHONE, height=height)]


def _endpoints(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["endpoints"]
    if not rows:
        return panel("Endpoints", empty("There are no endpoints yet."))
    hidden = data["totals"]["endpoints"] - len(rows)
    busy = [row for row in rows if not _is_quiet(row)]
    quiet = [row for row in rows if _is_quiet(row)]
    columns = _endpoint_columns(now)
    more = f"and {wording.exact(hidden)} more"
    return panel(
        "Endpoints",
        [
            table(busy, columns) if busy else empty("Nothing is under way."),
            quiet
            and tag(
                "details",
                tag("summary", f"{wording.exact(len(quiet))} with nothing to do" + (f", {more}" if hidden > 0 else "")),
                table(quiet, columns),
                class_="folded",
            ),
            hidden > 0 and not quiet and tag("p", more, class_="quiet"),
        ],
        note="the worst first",
    )


def _is_quiet(row: Row) -> bool:
    """Nothing flows, waits or has died: there is nothing to look at."""
    return row["state"] in ("idle", "disabled") and not (row["waiting"] or row["in_flight"] or row["dead"])


def _endpoint_columns(now: datetime.datetime) -> list[Column]:
    return [
        ("", "state", _state),
        ("endpoint", "name", _name),
        ("waiting", "n", lambda row: ("~" if row["is_estimate"] else "") + wording.exact(row["waiting"])),
        (
            "due for",
            "n",
            lambda row: row["due_since"] and wording.duration((now - wording.time(row["due_since"])).total_seconds()),
        ),
        ("in flight", "n", lambda row: row["in_flight"] or ""),
        ("/s", "n", lambda row: wording.number(row["per_second"]) if row["per_second"] else ""),
        ("failed", "n", _failed),
        ("p50", "n quiet", lambda row: wording.milliseconds(row["p50_ms"])),
        ("p95", "n", lambda row: wording.milliseconds(row["p95_ms"])),
        ("dead", "n", _dead),
        ("last hour", "spaced", _last_hour),
        ("last error", "error", lambda row: _error(row, now)),
    ]


def _name(row: Row) -> Child:
    """The receiver's host, never its path or query: they may hold a token."""
    return [
        tag("b", row["name"], data_endpoint=row["name"]),
        tag("span", row["host"] or row["protocol"], class_="quiet host", title=row["host"]),
    ]


def _dead(row: Row) -> Child:
    about = "~" if row["dead_is_estimate"] else ""
    return tag("b", about + wording.exact(row["dead"]), class_="warn") if row["dead"] else ""


def _last_hour(row: Row) -> Markup:
    delivered, failed = row["last_hour"] or [], row["last_hour_failed"] or []
    said = f"the last hour of {row['name']}: {wording.exact(sum(delivered))} delivered"
    return chart.sparkline(f"{said}, {wording.exact(sum(failed))} failed attempts", delivered, failed)


def _state(row: Row) -> Markup:
    state = row["state"]
    return tag("span", f"{row['glyph']} {state.replace('_', ' ')}", class_=f"pill {MOODS.get(state, 'calm')}")


def _failed(row: Row) -> Child:
    share = row["failed_percent"]
    if share is None:
        return ""
    return [f"{share:.1f}%", chart.meter(share / 100, "failed")]


def _error(row: Row, now: datetime.datetime) -> Child:
    if not row["last_error"]:
        return None
    return [
        tag("span", row["last_error"], title=row["last_error"]),
        tag("small", wording.ago(row["last_failure_at"], now), class_="quiet"),
    ]


def _workers(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["workers"]
    if not rows:
        return panel("Workers", empty("No worker has ever reported. To start some: select * from ulak.start();"))
    columns: list[Column] = [
        ("", "state", lambda row: tag("span", row["state"], class_=f"pill {WORKER_MOODS.get(row['state'], 'calm')}")),
        (
            "worker",
            "name",
            lambda row: (tag("b", row["slot"]), row["host"] and tag("span", row["host"], class_="quiet")),
        ),
        ("in flight", "n", lambda row: row["in_flight"] or ""),
        ("settled", "n", lambda row: wording.number(row["messages_processed"])),
        ("failed", "n", lambda row: wording.number(row["error_count"])),
        ("last seen", "n", lambda row: wording.ago(row["heartbeat_at"], now)),
    ]
    return panel("Workers", table(rows, columns))


def _partitions(data: Row) -> Markup:
    rows: Sequence[Row] = data["partitions"]
    # Empty partitions are a few pages each: nothing to compare.
    most = max(8 << 20, *(row["bytes"] for row in rows))
    columns: list[Column] = [
        ("partition", "name", lambda row: tag("b", row["name"])),
        ("messages", "n", lambda row: "~" + wording.number(row["rows"]) if row["rows"] else ""),
        ("size", "n", lambda row: wording.size(row["bytes"])),
        ("", "wide", lambda row: chart.meter(row["bytes"] / most, "delivered")),
    ]
    return panel("Archive", table(rows, columns), note=f"the queue itself takes {wording.size(data['queue_bytes'])}")


def _maintenance(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["maintenance"]
    chips = (
        tag(
            "span",
            tag("i", class_=f"light {STEP_MOODS.get(row['state'], 'calm')}"),
            row["step"].replace("_", " "),
            row["state"] != "ok" and tag("b", row["state"]),
            class_="chip",
            title=f"{row['what']}; last run {wording.ago(row['started_at'], now)}",
        )
        for row in rows
    )
    errors = (
        tag("li", tag("b", row["step"]), tag("span", row["last_error"], class_="error", title=row["last_error"]))
        for row in rows
        if row["state"] == "failed"
    )
    last = max((row["started_at"] for row in rows if row["started_at"] and row["step"] != "vacuum"), default=None)
    return panel(
        "Maintenance",
        [tag("p", chips, class_="chips"), tag("ul", errors, class_="causes")],
        note=f"ran {wording.ago(last, now)}" if last else "never ran",
    )
