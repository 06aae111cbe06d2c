"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from demo.__main__ import DATABASE, POLICIES
from demo.picture import SIZE, read_label
from support.browser import SCHEMES, pixel
from support.cluster import PROJECT
from support.copies import current_version

# Columns of a line of prose.
WIDTH = 120
DOCUMENTS = sorted(
    path
    for folder in ("", "docker", "plpython", "sql", "tests", "tests/bench")
    for path in (PROJECT / folder).glob("*.md")
    if path.name != "CHANGELOG.md"
)
CHANGELOG = PROJECT / "CHANGELOG.md"
IDS = [str(path.relative_to(PROJECT)) for path in DOCUMENTS]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, CHANGELOG], ids=[*IDS, CHANGELOG.name])
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)

    assert broken == []


@pytest.mark.parametrize("document", [*DOCUMENTS, CHANGELOG], ids=[*IDS, CHANGELOG.name])
def test_no_line_of_prose_is_too_wide(document: Path) -> None:
    """A table's row, a picture's description, and what programs print can't be wrapped."""
    # Indented lines are code behind an empty line, else a list's item that goes on.
    text = re.sub(r"\n\n(( {4}.*)?\n)+", "\n\n", without_code(document.read_text()))
    prose = [line for line in text.split("\n") if not re.match(r" *\||<img | *<(source|img) ", line)]

    # A link, or code in backticks, isn't broken either.
    words = [re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "_"), line).split() for line in prose]
    assert [
        line
        for line, parts in zip(prose, words, strict=True)
        if len(line) > WIDTH and max(len(each) for each in parts) < WIDTH - 6
    ] == []


def test_every_release_has_a_date_and_a_way_back() -> None:
    _, *releases = re.split(r"^## ", CHANGELOG.read_text(), flags=re.MULTILINE)

    assert [each.split("\n")[0] for each in releases if not re.match(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)\n", each)] in (
        [],
        [f"{current_version()} (not released yet)"],
    )
    assert [each.split("\n")[0] for each in releases if "**The way back:**" not in each] == []


def test_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 220


def test_every_picture_is_there_and_small() -> None:
    text = (PROJECT / "README.md").read_text()
    pictures = {name: PROJECT / name for name in re.findall(r'(?:src|srcset)="([^"]+)"', text)}

    assert sorted(path.name for path in pictures.values()) == ["console-dark.png", "console-light.png", "message.svg"]
    for path in pictures.values():
        assert path.stat().st_size < 200_000, path.name


def test_the_pictures_of_the_console_show_the_demo_in_both_colour_schemes() -> None:
    brightness = {}
    for scheme in SCHEMES:
        path = PROJECT / "docker/pictures" / f"console-{scheme}.png"

        shown = {"title": f"ulak: {DATABASE}", "endpoints": sorted(POLICIES), "scheme": scheme}
        assert read_label(path.read_bytes()) == shown, "make screenshot"
        brightness[scheme] = sum(pixel(path, 5, SIZE[1] // 2))

    assert brightness["dark"] < 200 < 600 < brightness["light"]


def test_the_drawing_reads_in_both_colour_schemes() -> None:
    """Its colours are names, which have a value for each scheme."""
    text = (PROJECT / "docker/pictures/message.svg").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")

    names = re.compile(r"--(\w+): #")
    assert names.findall(light) == names.findall(dark.split("text {")[0])
    assert not re.search(r'(?:fill|stroke)[:=] ?"?#', text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_file_of_the_project_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"`((?:docker|plpython|sql|tests)/[a-z\d_./]+)`", document.read_text())

    assert [name for name in named if not (PROJECT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_function_that_is_named_exists(db: psycopg.Connection[Any], document: Path) -> None:
    named = set(re.findall(r"\b(ulak(?:_private)?\.\w+)\(", document.read_text()))
    functions = "select pronamespace::regnamespace || '.' || proname from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    there = {name for (name,) in db.execute(functions)}

    assert sorted(named - there) == []


@pytest.mark.parametrize("folder", ["schema", "code"])
def test_the_map_of_the_sql_has_every_file_and_no_other(folder: str) -> None:
    text = (PROJECT / "sql" / "README.md").read_text()
    start = text.index(f"`{folder}/` | |")
    named = []
    for row in text[start : text.index("\n\n", start)].splitlines()[2:]:
        room = re.match(r"\| `(\d_\w+/)`", row)
        named += [(room[1] if room else "") + name for name in re.findall(r"`(\w+\.sql)`", row)]

    place = PROJECT / "sql" / folder
    assert sorted(named) == sorted(str(path.relative_to(place)) for path in place.rglob("*.sql"))


@pytest.mark.parametrize(
    ("heading", "folder"), [("| where | what |", "ulak"), ("| file | what it does |", "ulak/worker")]
)
def test_the_maps_of_the_python_have_every_module_and_no_other(heading: str, folder: str) -> None:
    text = (PROJECT / "plpython" / "README.md").read_text()
    start = text.index(heading)
    rows = text[start : text.index("\n\n", start)].split("\n")[2:]
    named = [
        name.removeprefix("ulak/").rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    there = [path.name for path in (PROJECT / "plpython" / folder).iterdir() if path.name[0] != "_"]

    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("room", ["messages", "safety", "sessions", "transports"])
def test_the_map_of_the_python_has_every_module_of_a_room(room: str) -> None:
    text = (PROJECT / "plpython" / "README.md").read_text()
    (row,) = re.findall(rf"^\| `ulak/{room}/` \|(.*)\|$", text, re.MULTILINE)
    there = [path for path in (PROJECT / "plpython/ulak" / room).iterdir() if path.name[0] != "_"]

    assert sorted(re.findall(r"`(\w+\.py|\w+/)`", row)) == sorted(
        path.name + ("/" if path.is_dir() else "") for path in there
    )


def test_no_function_named_in_the_map_of_the_sql_is_gone(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "sql" / "README.md").read_text()
    there = {
        name
        for (name,) in db.execute(
            "select proname from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
        )
    }

    assert [name for name in re.findall(r"`(_?[a-z_]+)\(\)`", text) if name not in there] == []


def test_readme_or_the_guide_names_every_key_of_a_config_and_of_a_retry_policy(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "README.md").read_text() + (PROJECT / "sql" / "GUIDE.md").read_text()
    keys = db.execute(
        """
        select jsonb_object_keys(ulak_private.config_schema(protocol) -> 'properties')
        from unnest(ulak_private.protocols()) as protocol
        union select jsonb_object_keys(ulak_private.retry_policy_schema() -> 'properties')
        """
    ).fetchall()

    assert [key for (key,) in keys if f"`{key}`" not in text] == []


def test_the_runbook_names_every_step_of_maintenance(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "docker" / "OPERATIONS.md").read_text()
    table = text[text.index("| step | what it does") :].split("\n\n")[0]
    named = {step for line in table.splitlines() for step in line.split("|")[1].strip().split(", ")}
    steps = {step for (step,) in db.execute("select step from ulak.maintenance_status where step <> 'vacuum'")}

    assert named - {"step", "---"} == steps
