"""The bench can be run. With so little to do, what it finds says nothing; `make bench` measures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bench import claim, horizon, peers
from bench.__main__ import DEFAULT, PARTS, part_of
from bench.figures import Figure, Quantity, markdown, plain
from bench.stage import Stage
from support.cluster import TEMPLATE, Cluster, CommandFailed
from support.timed_receiver import timed_receiver
from support.world import FULL

# One of each part, for the sake of time; `make chaos` has all.
SECTIONS = [
    f"{part}:{section}"
    for part in (*DEFAULT, "shape")
    for section in list(part_of(part).sections)[: None if FULL else 1]
]


@pytest.fixture(scope="module")
def other() -> Iterator[Cluster]:
    """As the server of another revision: it has the same extension."""
    other = Cluster.create(in_memory=True)
    other.install(other.create_database(TEMPLATE))
    yield other
    other.remove()


@pytest.fixture
def stage(cluster: Cluster, template: str, other: Cluster) -> Iterator[Stage]:
    """Nothing is fetched for it: its receiver is not nginx. Once is enough."""
    with ExitStack() as resources, timed_receiver() as receiver:
        stage = Stage({"other": other, None: cluster}, 0.001, resources, least_rounds=1)
        stage.__dict__["receiver"] = receiver.url
        yield stage


def no_package(name: str) -> Path:
    raise CommandFailed(f"there is no {name}")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_finds_figures(name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    part, section = name.split(":")
    monkeypatch.setattr(peers, "unpacked", no_package)
    # Some of many, for the sake of time.
    monkeypatch.setattr(claim, "OTHER_WAYS", [])
    monkeypatch.delitem(horizon.HOLDING, "one old snapshot")
    monkeypatch.setattr(claim, "STATISTICS", {"fresh statistics": "analyze"})

    figures = list(part_of(part).sections[section](stage))

    assert all(math.isfinite(quantity.value) for figure in figures for quantity in figure.quantities)
    assert figures


@pytest.mark.parametrize("name", [part for part in PARTS if part_of(part).compares])
def test_a_part_that_compares_finds_its_own_figures_alone_without_another_revision(
    name: str, cluster: Cluster, template: str
) -> None:
    with ExitStack() as resources, timed_receiver() as receiver:
        stage = Stage({None: cluster}, 0.001, resources, least_rounds=1)
        stage.__dict__["receiver"] = receiver.url
        section, *_ = part_of(name).sections.values()

        figures = list(section(stage))

    said = [quantity.what for figure in figures for quantity in figure.quantities]
    assert figures
    assert [what for what in said if "None" in what] == []
    if name == "against":
        assert {len(figure.quantities) for figure in figures} == {1}


def test_a_whole_run_leaves_out_only_what_is_to_be_asked_for() -> None:
    assert set(PARTS) - set(DEFAULT) == {"observe", "pull", "shape", "told"}


@pytest.mark.parametrize(
    ("quantity", "kept", "reached"),
    [
        (Quantity(9000, "/s", required=8000, aim=12_000), True, False),
        (Quantity(7000, "/s", required=8000), False, True),
        (Quantity(95, "us", aim=90), True, False),
        (Quantity(0.1, "share", required=0.1), True, True),
        (Quantity(0.85, "of", "one endpoint's", required=0.8, aim=0.9), True, False),
    ],
)
def test_of_a_rate_more_is_better_and_of_all_else_less(quantity: Quantity, kept: bool, reached: bool) -> None:
    assert (quantity.is_kept, quantity.is_reached) == (kept, reached)


def test_a_figure_says_what_was_asked_of_it() -> None:
    figure = Figure(
        "one worker", Quantity(9000, "/s", required=8000, aim=12_000), Quantity(85.21, "us", "each"), headline=True
    )
    other = Figure("another", Quantity(3, "times", required=2.5))
    part = Figure("many", Quantity(0.7, "of", "one endpoint's", required=0.8))
    shown: Any = {"delivery": [figure, other]}

    assert figure.cells() == ("one worker", "9,000/s, 85.2 us each", ">= 8,000/s, aim >= 12,000/s", "not the aim")
    assert other.cells() == ("another", "3.00x", "<= 2.50x", "NO")
    assert part.cells() == ("many", "0.70 of one endpoint's", ">= 0.80", "NO")
    assert plain("delivery", [figure, other]).splitlines()[2].split() == ["another", "3.00x", "<=", "2.50x", "NO"]
    assert markdown(shown).splitlines()[2:] == [
        "| `delivery`: one worker | 9,000/s, 85.2 us each | >= 8,000/s, aim >= 12,000/s | not the aim |"
    ]
