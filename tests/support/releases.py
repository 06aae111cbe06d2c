"""Releases to upgrade from and to: the last one, whose script is kept, and two made-up ones that come after this version.

The first of them adds a column to the table that senders and workers use most. The second adds one to another such table, and gives a
function of the first another result.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from support.cluster import PROJECT, run
from support.copies import copy_project, current_version

FIRST, SECOND = "9.1.0", "9.2.0"

SCHEMA = {
    FIRST: """
        alter table ulak_private.deliveries add column made_up integer;
        comment on column ulak_private.deliveries.made_up is 'made up';
    """,
    SECOND: """
        alter table ulak.endpoints add column made_up text;
        comment on column ulak.endpoints.made_up is 'made up';
    """,
}
# What the code can't replace: views whose columns move, and a function whose result changes. An upgrade from before the first release has
# no such function.
DROPPED = {
    FIRST: "drop view ulak.messages, ulak.queue;\n",
    SECOND: "drop function if exists ulak_private.made_up();\n",
}
FUNCTION = """
    create or replace function ulak_private.made_up()
    returns {}
    language sql
    stable
    as $sql$
        select max(m.made_up) from {} m
    $sql$;
"""
CODE = {FIRST: FUNCTION.format("integer", "ulak_private.deliveries"), SECOND: FUNCTION.format("text", "ulak.endpoints")}


def locking() -> str:
    """How a step begins: as sql/README.md has it."""
    (block,) = re.findall(r"^```sql\n(-- Take every table.*?)^```$", readme(), re.MULTILINE | re.DOTALL)
    return str(block)


def readme() -> str:
    return (PROJECT / "sql/README.md").read_text()


def released(folder: Path = PROJECT / "sql/released") -> list[str]:
    """The versions whose scripts are kept."""
    return [path.name.removeprefix("ulak--").removesuffix(".sql.xz") for path in sorted(folder.glob("ulak--*.sql.xz"))]


def release(project: Path, script: Path) -> None:
    """Keeps the script of this version, as sql/README.md has it."""
    folder = project / "sql/released"
    folder.mkdir(exist_ok=True)
    packed = lzma.compress(script.read_bytes(), preset=0)
    (folder / f"{script.name}.xz").write_bytes(packed)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(packed).hexdigest()}  {script.name}.xz\n")


class MadeUp(NamedTuple):
    """The projects of both."""

    first: Path
    second: Path


def make_releases(folder: Path) -> MadeUp:
    """This version is released, and the two come after it."""
    projects = []
    steps: dict[str, str] = {}
    before = current_version()
    run(["make", "-s", "-C", str(PROJECT), "build", f"BUILD={folder}/build"])
    for version, schema in SCHEMA.items():
        (folder / version).mkdir()
        project = copy_project(folder / version)
        shutil.rmtree(project / "sql/released", ignore_errors=True)
        release(project, folder / f"build/ulak--{current_version()}.sql")
        control = project / "control/ulak.control"
        control.write_text(control.read_text().replace(current_version(), version))
        steps[f"{before}--{version}.sql"] = f"{locking()}\n{schema}{DROPPED[version]}"
        (project / "sql/upgrade").mkdir(exist_ok=True)
        for name, text in steps.items():
            (project / "sql/upgrade" / name).write_text(text)
        (project / "sql/schema/99_made_up.sql").write_text("".join([*SCHEMA.values()][: len(steps)]))
        (project / "sql/code/8_looking/made_up.sql").write_text(CODE[version])
        projects.append(project)
        before = version
    return MadeUp(*projects)
