"""The table of how the scenarios of tests/chaos ended, whichever process ran them."""

from __future__ import annotations

import json
from typing import Any

from support.cluster import WORK

# The property of a test's reports that holds the scenario's row.
SCENARIO = "scenario"
COLUMNS = ("sent", "delivered", "dead", "expired", "duplicates", "verdict")


def write_table(terminalreporter: Any) -> None:
    """Into the summary of the run, and into a file."""
    reports = [each for reports in terminalreporter.stats.values() for each in reports]
    # The last report of each.
    ended = sorted((each for each in reports if getattr(each, "when", None) == "teardown"), key=lambda each: each.start)
    rows = [row for report in ended for name, row in report.user_properties if name == SCENARIO]
    if not rows:
        return
    (WORK / "chaos.json").write_text(json.dumps(rows, indent=1) + "\n")
    width = max(len(row["scenario"]) for row in rows)
    line = f"{{:<{width}}}" + "{:>11}" * (len(COLUMNS) - 1) + "  {}"
    terminalreporter.section("chaos")
    terminalreporter.write_line(line.format("scenario", *COLUMNS))
    for row in rows:
        terminalreporter.write_line(line.format(row["scenario"], *(str(row.get(name, "")) for name in COLUMNS)))
    terminalreporter.write_line(f"written to {WORK / 'chaos.json'}")
