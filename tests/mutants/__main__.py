"""Takes one thing out at a time, and sees the tests fail that say it is there: make mutants ARGS="findings -k queue"."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.cluster import PROJECT, WORK

from mutants import attacks, findings
from mutants.model import Mutant

PARTS = {"attacks": attacks.MUTANTS, "findings": findings.MUTANTS}
COPIED = ("Makefile", "README.md", "control", "docker", "plpython", "sql", "tests")


def apply(mutant: Mutant, project: Path) -> None:
    file = project / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has this {text.count(mutant.old)} times: {mutant.old!r}")
    file.write_text(text.replace(mutant.old, mutant.new))


def copy_project(folder: Path) -> Path:
    project = folder / "project"
    project.mkdir()
    for name in COPIED:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, project / name)
        else:
            shutil.copy(PROJECT / name, project)
    return project


def run(mutant: Mutant) -> list[str]:
    """The tests that failed. An error before or behind a test is none of these."""
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=WORK) as folder:
        project = copy_project(Path(folder))
        apply(mutant, project)
        environment = os.environ | {"PYTHONPATH": f"{project}/tests:{project}/plpython", "ULAK_CHAOS": "full"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *mutant.tests],
            cwd=project,
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
    failed = re.findall(r"^FAILED [^:]+::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if "+ Timeout +" in done.stdout + done.stderr:
        # A test that waits for ever would take the whole run with it.
        failed.append("(one that did not end)")
    if done.returncode != (1 if failed else 0):
        print(done.stdout[-3000:], done.stderr[-1000:], file=sys.stderr)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*PARTS])
    parser.add_argument("-k", default="", help="only those whose name has this text")
    parser.add_argument("--after", default="", help="only those behind the one of this name")
    arguments = parser.parse_args()
    survivors = []
    for part in arguments.parts:
        names = [mutant.name for mutant in PARTS[part]]
        first = names.index(arguments.after) + 1 if arguments.after in names else 0
        for mutant in PARTS[part][first:]:
            if arguments.k not in mutant.name:
                continue
            failed = run(mutant)
            print(f"{'noticed' if failed else 'SURVIVED':<9} {mutant.name}", flush=True)
            for test in failed:
                print(f"          {test}", flush=True)
            if not failed:
                survivors.append(mutant.name)
    if survivors:
        raise SystemExit(f"not noticed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
