"""What others build and run from this project: the archive for PGXN, the license, manifests, and what is installed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from kubernetes_validate import validate
from support.cluster import PG_CONFIG, PROJECT, Connect, extension_path, major, run
from support.copies import current_version
from support.debian import unpacked_together

MANIFESTS = sorted((PROJECT / "docker" / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.31"


def make_archive(folder: Path, project: Path = PROJECT) -> Path:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1800000000"}
    run(["make", "-s", "-C", str(project), "dist", f"BUILD={folder}"], env=environment)
    return folder / "dist" / f"ulak-{current_version()}.zip"


def copy_of_project(folder: Path) -> Path:
    """With other times, and what a build and Python leave behind."""
    folder.mkdir()
    for path in PROJECT.iterdir():
        if path.name in ("Makefile", "README.md", "CHANGELOG.md", "LICENSE"):
            shutil.copyfile(path, folder / path.name)
        elif path.name in ("control", "docker", "plpython", "sql"):
            shutil.copytree(path, folder / path.name, copy_function=shutil.copy)
    (folder / "plpython" / "__pycache__").mkdir(exist_ok=True)
    (folder / "plpython" / "__pycache__" / "left.pyc").touch()
    return folder


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    first = make_archive(tmp_path / "a")
    second = make_archive(tmp_path / "b", copy_of_project(tmp_path / "copy"))

    assert hashlib.sha256(first.read_bytes()).hexdigest() == hashlib.sha256(second.read_bytes()).hexdigest()
    with zipfile.ZipFile(first) as archive:
        meta = json.loads(archive.read(f"ulak-{current_version()}/META.json"))
        names = {name.split("/")[1] for name in archive.namelist()}
    assert (meta["version"], meta["provides"]["ulak"]["version"]) == (current_version(), current_version())
    assert names == {
        "CHANGELOG.md",
        "LICENSE",
        "META.json",
        "Makefile",
        "README.md",
        "control",
        "docker",
        "plpython",
        "sql",
    }


def test_pgxn_installs_the_archive(tmp_path: Path, connect: Connect) -> None:
    archive = make_archive(tmp_path)
    tools = unpacked_together("pgxn", ["pgxnclient", "python3-six"])
    environment = {
        **os.environ,
        "DESTDIR": str(tmp_path / "root"),
        "PYTHONPATH": str(tools / "usr/lib/python3/dist-packages"),
        "HOME": str(tmp_path),
    }

    # In place of sudo: DESTDIR is a folder of our own.
    options = ["--sudo", "env", "--pg_config", PG_CONFIG]
    run(["/usr/bin/python3", str(tools / "usr/bin/pgxn"), "install", *options, str(archive)], env=environment)

    db = connect()
    db.execute("drop extension ulak cascade")
    db.execute("select set_config(%s, %s, false)", extension_path(tmp_path / "root"))
    db.execute("set ulak.accept_roles = on")
    db.execute("create extension ulak cascade")
    assert db.execute("select extversion from pg_extension where extname = 'ulak'").fetchone() == (current_version(),)
    # The setup is beside the server's programs.
    assert list((tmp_path / "root").rglob("ulak-setup"))


@pytest.mark.skipif(major() < 18, reason="extension_control_path came with PostgreSQL 18")
def test_a_server_finds_the_extension_by_its_path_alone(tmp_path: Path, connect: Connect) -> None:
    """As operators mount it: a folder with share/extension in it, and nothing of it in the server's own."""
    run(["make", "-s", "-C", str(PROJECT), "build", f"BUILD={tmp_path}/build"])
    folder = tmp_path / "ulak" / "share" / "extension"
    folder.mkdir(parents=True)
    for path in (*tmp_path.glob("build/ulak--*.sql"), PROJECT / "control/ulak.control"):
        shutil.copy(path, folder)
    db: psycopg.Connection[Any] = connect()
    db.execute("drop extension ulak cascade")

    db.execute("select set_config('extension_control_path', %s, false)", [f"{folder.parent}:$system"])
    db.execute("set ulak.accept_roles = on")
    db.execute("create extension ulak cascade")

    assert db.execute("select extversion from pg_extension where extname = 'ulak'").fetchone() == (current_version(),)


def test_the_license_is_named_where_people_look() -> None:
    license = (PROJECT / "LICENSE").read_text()
    meta = json.loads(subprocess.run([sys.executable, PROJECT / "control/meta.py"], capture_output=True).stdout)

    assert license.startswith("The PostgreSQL License") and "the ulak contributors" in license
    for name in ("README.md", "control/ulak.control", "control/debian/copyright"):
        text = (PROJECT / name).read_text()
        assert "the ulak contributors" in text and re.search(r"PostgreSQL License|License: PostgreSQL", text), name
    assert meta["license"] == "postgresql"
    paragraphs = [" ".join(each.split()) for each in license.split("\n\n")[2:]]
    copied = " ".join((PROJECT / "control/debian/copyright").read_text().split()).replace(" . ", " ")
    assert [each for each in paragraphs if each not in copied] == []


def test_only_the_server_of_compose_begins_as_root() -> None:
    """It drops its rights itself. All other containers of ours run as an unprivileged user from the start."""
    services: dict[str, Any] = {}
    for name in ("compose.yaml", "monitoring/compose.yaml"):
        for service, given in yaml.safe_load((PROJECT / "docker" / name).read_text())["services"].items():
            services.setdefault(service, given)
    ours = {name: each for name, each in services.items() if each["image"].startswith("ulak")}

    def user(service: dict[str, Any]) -> str:
        if "user" in service:
            return str(service["user"])
        build = service["build"]
        file = PROJECT / "docker" / build["context"] / build.get("dockerfile", "Dockerfile")
        found = re.findall(r"^USER (.*)$", file.read_text(), re.MULTILINE)
        return found[-1] if found else "root"

    assert {"console", "exporter", "hello", "node"} < set(ours)
    assert [name for name, each in ours.items() if user(each) in ("root", "0", "0:0")] == ["database"]
    for name, each in ours.items():
        if name != "database":
            assert (each["read_only"], each["cap_drop"]) == (True, ["ALL"])
            assert each["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.name))
def test_manifests_are_valid_and_run_nothing_as_root(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))

    for document in documents:
        validate(document, KUBERNETES, strict=True)
    (workload,) = [each["spec"] for each in documents if each["kind"] in ("Deployment", "CronJob")]
    pod = workload.get("jobTemplate", {"spec": workload})["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        image, _, tag = container["image"].partition(":")
        assert tag == current_version() or not image.startswith("ulak")
