"""Copies of the project that differ: a next release, or a build with something taken out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psycopg

from support.cluster import PROJECT, extension_path, stage_extension

NEXT = "9.9.9"


def current_version(project: Path = PROJECT) -> str:
    control = (project / "control/ulak.control").read_text()
    (line,) = [line for line in control.splitlines() if line.startswith("default_version")]
    return line.split("'")[1]


def copy_project(folder: Path) -> Path:
    project = folder / "project"
    project.mkdir()
    shutil.copy(PROJECT / "Makefile", project)
    for name in ("control", "plpython", "sql"):
        shutil.copytree(PROJECT / name, project / name)
    return project


def make_next_release(folder: Path) -> Path:
    """The project as its next release might be: other version, other Python, an upgrade with nothing of its own."""
    project = copy_project(folder)
    version = current_version()
    control = project / "control/ulak.control"
    control.write_text(control.read_text().replace(version, NEXT))
    (project / "sql/upgrade").mkdir(exist_ok=True)
    (project / f"sql/upgrade/{version}--{NEXT}.sql").write_text("-- Nothing but replayed code.\n")
    (project / "plpython/ulak/probe.py").write_text("VALUE = 'next'\n")
    return project


def use(connection: psycopg.Connection[Any], project: Path) -> None:
    """Lets this session see the extension of that project instead of the cluster's own."""
    stage = project.parent / "staged" / "stage"
    if not stage.exists():
        stage_extension(stage.parent, project)
    connection.execute("select set_config(%s, %s, false)", extension_path(stage))
