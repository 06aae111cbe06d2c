"""The script of the last release, and the steps from one version to the next."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from support.cluster import PROJECT
from support.copies import current_version
from support.releases import SECOND, locking, make_releases, released

CHANGES_A_TABLE = re.compile(r"^\s*(?:alter table|create (?:unique )?index|drop (?:table|index))", re.MULTILINE)


def changed(project: Path) -> set[str]:
    """Scripts of releases that aren't as they were, and those without a hash."""
    folder = project / "sql/released"
    sums = folder / "SHA256SUMS"
    wanted = {tuple(reversed(line.split())) for line in (sums.read_text().splitlines() if sums.exists() else [])}
    found = {(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.glob("ulak--*")}
    return {str(name) for name, *_ in wanted ^ found}


def gaps(project: Path) -> list[str]:
    """Each version begins where the one before it ended, and the last one is this one."""
    steps = [path.stem.split("--") for path in (project / "sql/upgrade").glob("*")]
    steps.sort(key=lambda step: [int(number) for number in step[0].split(".")])
    ends = [*(start for start, _ in steps[1:]), current_version(project)]
    return [f"{start}--{end}" for (start, end), wanted in zip(steps, ends, strict=False) if end != wanted]


def without_locks(project: Path) -> list[str]:
    texts = {path.name: path.read_text() for path in (project / "sql/upgrade").glob("*.sql")}
    return [name for name, text in texts.items() if CHANGES_A_TABLE.search(text) and not text.startswith(locking())]


def test_what_was_released_is_never_changed(tmp_path: Path) -> None:
    """Neither here, where nothing may be released yet, nor where something is."""
    project = make_releases(tmp_path).second
    assert (changed(PROJECT), changed(project)) == (set(), set())

    (script,) = (project / "sql/released").glob("*.xz")
    script.write_bytes(script.read_bytes() + b"more")

    assert changed(project) == {script.name}
    (project / "sql/released/SHA256SUMS").unlink()
    assert changed(project) == {script.name}


def test_only_the_last_release_is_kept() -> None:
    assert len(released()) <= 1


def test_versions_follow_each_other(tmp_path: Path) -> None:
    project = make_releases(tmp_path).second
    assert gaps(PROJECT) == gaps(project) == []

    (step,) = (project / "sql/upgrade").glob(f"*--{SECOND}.sql")
    step.unlink()

    assert gaps(project) != []


def test_steps_that_change_a_table_begin_with_taking_all_of_them(tmp_path: Path) -> None:
    project = make_releases(tmp_path).second
    assert without_locks(PROJECT) == without_locks(project) == []

    for step in (project / "sql/upgrade").glob("*.sql"):
        step.write_text("alter table ulak.endpoints add column more integer;\n" + step.read_text())

    assert len(without_locks(project)) == 2
