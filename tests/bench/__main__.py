"""make bench: how fast it is.

make bench ARGS="send delivery:throughput --scale 0.1 --markdown"
make bench ARGS="against breadth ordering --against HEAD~3"
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.cluster import WORK, Cluster, remove_abandoned

from bench.circumstances import circumstances, load, sentence
from bench.figures import Figure, markdown, plain
from bench.stage import Clusters, Part, Stage, server, settings_of

# About half an hour together, on two cores that have nothing else to do.
DEFAULT = (
    "send",
    "claim",
    "delivery",
    "brokers",
    "ordering",
    "breadth",
    "events",
    "latency",
    "archive",
    "horizon",
    "growth",
    "peers",
    "against",
    "upgrade",
    "nodes",
)
PARTS = (*DEFAULT, "pull", "shape", "observe", "told")


def part_of(name: str) -> Part:
    part: Part = importlib.import_module(f"bench.{name}").PART
    return part


class Run:
    def __init__(self, clusters: Clusters, scale: float) -> None:
        self.clusters = clusters
        self.scale = scale
        self.figures: dict[str, list[Figure]] = {}
        self.failed: list[str] = []
        self.circumstances = {**circumstances(clusters[None], scale), "against": next(iter(clusters))}
        self.file: Path = WORK / "bench" / f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
        self._parts: dict[str, dict[str, Any]] = {}

    def perform(self, name: str, sections: list[str]) -> None:
        part = part_of(name)
        figures = self.figures.setdefault(name, [])
        began, load_before = time.monotonic(), load()
        with ExitStack() as resources:
            for cluster in self.clusters.values():
                resources.enter_context(settings_of(cluster, part))
            stage = Stage(self.clusters, self.scale, resources)
            for section in sections:
                say(f"{name}:{section} ...")
                self._perform_section(f"{name}:{section}", part, stage, figures)
        took = time.monotonic() - began
        print(f"\n{part.about}\n\n{plain(name, figures)}\n", flush=True)
        if part.compares and stage.against is None:
            say(f"{name}: nothing was compared; --against REVISION measures that one, too")
        say(f"{name} took {took:.0f} s; load {load_before[0]} before, {load()[0]} after")
        self._parts[name] = {
            "figures": [figure.as_json() for figure in figures],
            "details": stage.details,
            "seconds": round(took, 1),
            "load_before": load_before,
            "load_after": load(),
            "settings": dict(part.settings),
        }
        self._write()

    def _perform_section(self, name: str, part: Part, stage: Stage, figures: list[Figure]) -> None:
        """A part that breaks must not take the figures of the others with it."""
        try:
            figures += part.sections[name.split(":")[1]](stage)
        except Exception:
            self.failed.append(name)
            traceback.print_exc()

    def _write(self) -> None:
        """After each part: what was measured so far outlives an interruption."""
        self.file.parent.mkdir(exist_ok=True)
        content = {"circumstances": self.circumstances, "parts": self._parts, "failed": self.failed}
        self.file.write_text(json.dumps(content, indent=1) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def chosen_sections(names: list[str]) -> dict[str, list[str]]:
    """part or part:section, in the order of PARTS."""
    chosen: dict[str, list[str]] = {}
    for name in names or DEFAULT:
        part, _, section = name.partition(":")
        if part not in PARTS:
            sys.exit(f"no such part: {part}. There are: {', '.join(PARTS)}")
        known = part_of(part).sections
        if section and section not in known:
            sys.exit(f"no such section of {part}: {section}. There are: {', '.join(known)}")
        chosen.setdefault(part, []).extend([section] if section else known)
    return {part: chosen[part] for part in PARTS if part in chosen}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=f"Parts: {', '.join(PARTS)}.")
    parser.add_argument("parts", nargs="*", help=f"part or part:section; without: {', '.join(DEFAULT)}")
    parser.add_argument("--scale", type=float, default=1, help="of the work: 0.1 for a quick look (default 1)")
    parser.add_argument(
        "--against", metavar="REVISION", help="of git's: the extension as it was then is measured beside this one"
    )
    parser.add_argument("--markdown", action="store_true", help="end with the table that README shows")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    sections = chosen_sections(chosen.parts)
    remove_abandoned()
    with ExitStack() as servers:
        clusters: dict[str | None, Cluster] = {}
        if chosen.against is not None:
            # tests/sandbox.sh has exported it.
            clusters[chosen.against] = servers.enter_context(server(Path(os.environ["ULAK_AGAINST"])))
        clusters[None] = servers.enter_context(server())
        run = Run(clusters, chosen.scale)
        say(f"{run.circumstances['postgresql']}, {run.circumstances['pycurl']}, {run.circumstances['cores']} cores")
        for part, names in sections.items():
            run.perform(part, names)
    if len(sections) > 1:
        print("\n\n".join(plain(part, figures) for part, figures in run.figures.items()))
    if chosen.markdown:
        print(f"\n{sentence(run.circumstances)}\n\n{markdown(run.figures)}")
    print(f"\nwritten to {run.file}")
    # The bounds are for scale 1: at a smaller scale, fixed costs weigh too much.
    missed = [figure.name for figures in run.figures.values() for figure in figures if not figure.is_kept]
    if missed:
        print(f"not as required: {', '.join(missed)}")
    if run.failed:
        sys.exit(f"failed: {', '.join(run.failed)}")


if __name__ == "__main__":
    main()
