"""Writes PGXN's META.json from the control file: name, version and what it is stand there alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

CONTROL = Path(__file__).resolve().parent / "ulak.control"


def control() -> dict[str, str]:
    return dict(re.findall(r"^(\w+) *= *'?(.*?)'?$", CONTROL.read_text("utf-8"), re.MULTILINE))


def meta() -> dict[str, object]:
    given = control()
    version = given["default_version"]
    return {
        "name": "ulak",
        "abstract": given["comment"],
        "description": "Send a message in your own transaction; a worker in the database delivers it, retries it with "
        "backoff, protects receivers with a circuit breaker, and parks what can't be delivered in a dead-letter queue.",
        "version": version,
        "maintainer": "The ulak contributors",
        "license": "postgresql",
        "provides": {
            "ulak": {
                "file": "sql/schema",
                "docfile": "README.md",
                "version": version,
                "abstract": given["comment"],
            }
        },
        "prereqs": {
            "runtime": {
                "requires": {"PostgreSQL": "15.0.0", given["requires"]: 0},
                "recommends": {"pg_cron": "1.4.0"},
            }
        },
        "generated_by": "control/meta.py",
        "meta-spec": {"version": "1.0.0", "url": "https://pgxn.org/meta/spec.txt"},
        "tags": ["outbox", "webhooks", "message queue", "delivery", "retry", "circuit breaker"],
        "release_status": "testing",
    }


if __name__ == "__main__":
    json.dump(meta(), sys.stdout, indent=3)
    print()
