"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import PROJECT

DOCUMENTS = sorted(
    path
    for folder in ("", "docker", "plpython", "sql", "tests", "tests/bench")
    for path in (PROJECT / folder).glob("*.md")
    if path.name != "CHANGELOG.md"
)
IDS = [str(path.relative_to(PROJECT)) for path in DOCUMENTS]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_file_of_the_project_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"`((?:docker|plpython|sql|tests)/[a-z\d_./]+)`", document.read_text())

    assert [name for name in named if not (PROJECT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_function_that_is_named_exists(db: psycopg.Connection[Any], document: Path) -> None:
    named = set(re.findall(r"\bulak\.(\w+)\(", document.read_text()))
    there = {name for (name,) in db.execute("select proname from pg_proc where pronamespace = 'ulak'::regnamespace")}

    assert sorted(named - there) == []


@pytest.mark.parametrize("folder", ["schema", "code"])
def test_the_map_of_the_sql_has_every_file_and_no_other(folder: str) -> None:
    text = (PROJECT / "sql" / "README.md").read_text()
    start = text.index(f"`{folder}/` | |")
    named = re.findall(r"`(\d\d_\w+\.sql)`", text[start : text.index("\n\n", start)])

    assert sorted(named) == sorted(path.name for path in (PROJECT / "sql" / folder).glob("*.sql"))


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


def test_no_function_named_in_the_map_of_the_sql_is_gone(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "sql" / "README.md").read_text()
    there = {name for (name,) in db.execute("select proname from pg_proc where pronamespace = 'ulak'::regnamespace")}

    assert [name for name in re.findall(r"`(_?[a-z_]+)\(\)`", text) if name not in there] == []


def test_readme_or_the_guide_names_every_key_of_a_config_and_of_a_retry_policy(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "README.md").read_text() + (PROJECT / "sql" / "GUIDE.md").read_text()
    keys = db.execute(
        """
        select jsonb_object_keys(ulak._config_schema(protocol) -> 'properties')
        from unnest(ulak._protocols()) as protocol
        union select jsonb_object_keys(ulak._retry_policy_schema() -> 'properties')
        """
    ).fetchall()

    assert [key for (key,) in keys if f"`{key}`" not in text] == []


def test_the_runbook_names_every_step_of_maintenance(db: psycopg.Connection[Any]) -> None:
    text = (PROJECT / "docker" / "OPERATIONS.md").read_text()
    table = text[text.index("| step | what it does") :].split("\n\n")[0]
    named = {step for line in table.splitlines() for step in line.split("|")[1].strip().split(", ")}
    steps = {step for (step,) in db.execute("select step from ulak.maintenance_status where step <> 'vacuum'")}

    assert named - {"step", "---"} == steps
