"""The scripts of earlier releases."""

from __future__ import annotations

import hashlib

from support.cluster import PROJECT


def test_what_was_released_is_never_changed() -> None:
    released = PROJECT / "sql" / "released"
    sums = dict(reversed(line.split()) for line in (released / "SHA256SUMS").read_text().splitlines())

    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in released.glob("ulak--*.sql")}
