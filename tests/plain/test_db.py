"""The tests of tests/db on a plain installation. Here a choice of them, where pg_cron is; `make test-plain` runs all that apply."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.plain import DOES_NOT_APPLY

DB = Path(__file__).resolve().parents[1] / "db"
# One for each part of the SQL, and those that look into the server.
CHOSEN = [
    *("archive", "backpressure", "breaker", "cancel", "claim", "claim_cost", "dlq", "doctor", "explain"),
    *("failure", "fairness", "health", "lease", "metrics", "payload_guard", "rate_limit", "recovery"),
    *("recurring", "redrive", "send", "settings", "top", "traffic"),
]


def test_they_pass_for_an_owner_without_superuser_rights() -> None:
    files = [DB / f"test_{name}.py" for name in CHOSEN]

    # Their time-out comes before that of this test, and names the one that hangs.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--timeout=900", "-o", "faulthandler_timeout=899", *files],
        env={**os.environ, "ULAK_PLAIN": "installed"},
        cwd=DB.parents[1],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def test_what_does_not_apply_is_still_there() -> None:
    """A test that was renamed or removed would stay in the list for ever."""
    missing = []
    for entry in DOES_NOT_APPLY:
        file, _, test = entry.partition("::")
        path = DB.parent / file
        if not path.exists() or (test and not test.startswith("*") and f"def {test}(" not in path.read_text()):
            missing.append(entry)

    assert missing == []
