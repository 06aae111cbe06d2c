"""The Python that the extension carries: embedded byte by byte, imported once, replaced with the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import PROJECT, Connect

DB = psycopg.Connection[Any]

AWKWARD = '''"""Awkward to quote: $module$ $source$ $python$ $$ 'x' "y" \\ \\n ünï

\tand a tab."""
TEXT = """a
b\tc $module$ $module_$ \\\\"""
END = "$"'''

FAILING = """\
def outer():
    inner()

def inner():
    raise ValueError("on line five")
"""


def embed(folder: Path, modules: dict[str, str]) -> str:
    """The generated SQL of a build with these modules beside the real ones."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PROJECT / "plpython", folder)
    for name, source in modules.items():
        (folder / "ulak" / name).write_text(source, "utf-8")
    done = subprocess.run([sys.executable, folder / "embed.py"], capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout


def run_python(db: DB, body: str) -> str:
    """The value of `answer` after this PL/Python ran in the session."""
    keep = """plpy.execute(plpy.prepare("select set_config('test.answer', $1, false)", ["text"]), [str(answer)])"""
    db.execute(f"do $body$\n{body}\n{keep}\n$body$ language plpython3u")
    row = db.execute("select current_setting('test.answer')").fetchone()
    assert row is not None
    return str(row[0])


LOAD = 'plpy.execute("select ulak_private.load_python()")\n'


def test_every_module_is_carried_unchanged(db: DB) -> None:
    files = {
        path.relative_to(PROJECT / "plpython"): path.read_text() for path in (PROJECT / "plpython").glob("ulak/**/*.py")
    }

    carried = dict(db.execute("select module, source from ulak_private.python_source()").fetchall())

    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): text for path, text in files.items()}
    assert carried == names


def test_every_module_can_be_imported_in_a_backend(db: DB) -> None:
    modules = [name for (name,) in db.execute("select module from ulak_private.python_source()")]

    answer = run_python(
        db, f"{LOAD}import importlib\nanswer = [importlib.import_module(name).__name__ for name in {modules!r}]"
    )

    assert answer == str(modules)


def test_awkward_text_survives_the_build(db: DB, tmp_path: Path) -> None:
    db.execute(embed(tmp_path / "plpython", {"awkward.py": AWKWARD}))

    row = db.execute("select source from ulak_private.python_source() where module = 'ulak.awkward'").fetchone()

    assert row == (AWKWARD,)
    assert run_python(db, f"{LOAD}from ulak import awkward\nanswer = repr(awkward.TEXT + awkward.END)") == repr(
        "a\nb\tc $module$ $module_$ \\" + "$"
    )


@pytest.mark.parametrize("text", ["'@extschema@'", "'@extowner@'", "'''\n\\echo hello'''"])
def test_text_that_create_extension_would_rewrite_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="would rewrite"):
        embed(tmp_path / "plpython", {"rewritten.py": f"X = {text}"})


def test_a_new_build_replaces_the_modules_of_a_running_session(db: DB, tmp_path: Path) -> None:
    ask = f"{LOAD}from ulak import probe\nanswer = probe.VALUE"
    db.execute(embed(tmp_path / "plpython", {"probe.py": "VALUE = 1"}))
    assert run_python(db, ask) == "1"

    db.execute(embed(tmp_path / "plpython", {"probe.py": "VALUE = 2"}))

    assert run_python(db, ask) == "2"
    assert (
        run_python(
            db, "import sys\nanswer = [type(finder).__name__ for finder in sys.meta_path].count('ExtensionModules')"
        )
        == "1"
    )


def test_a_build_that_is_rolled_back_takes_its_modules_along(connect: Connect, tmp_path: Path) -> None:
    session = connect(autocommit=False)
    ask = f"{LOAD}from ulak import probe\nanswer = probe.VALUE"
    session.execute(embed(tmp_path / "plpython", {"probe.py": "VALUE = 1"}))
    session.commit()
    session.execute(embed(tmp_path / "plpython", {"probe.py": "VALUE = 2"}))
    assert run_python(session, ask) == "2"

    session.rollback()

    assert run_python(session, ask) == "1"


def test_a_loaded_session_does_not_read_the_sources_again(db: DB, connect: Connect) -> None:
    db.execute("select ulak_private.load_python()")
    db.execute("alter function ulak_private.python_source() rename to _python_source_gone")

    db.execute("select ulak_private.load_python()")

    with pytest.raises(psycopg.errors.UndefinedFunction):
        connect().execute("select ulak_private.load_python()")


def test_the_stamp_follows_the_sources(db: DB, tmp_path: Path) -> None:
    stamps = []
    for value in (1, 1, 2):
        db.execute(embed(tmp_path / "plpython", {"probe.py": f"VALUE = {value}"}))
        stamps.append(db.execute("select ulak_private.python_stamp()").fetchone())

    assert stamps[0] == stamps[1] != stamps[2]


def test_tracebacks_name_the_real_file_and_line(db: DB, tmp_path: Path) -> None:
    fail = (
        f"{LOAD}import traceback\nfrom ulak import failing\n"
        "try:\n    failing.outer()\nexcept ValueError:\n    answer = traceback.format_exc()"
    )
    db.execute(embed(tmp_path / "plpython", {"failing.py": FAILING.replace("five", "six")}))
    run_python(db, fail)
    db.execute(embed(tmp_path / "plpython", {"failing.py": FAILING}))

    answer = run_python(db, fail)

    assert 'File "plpython/ulak/failing.py", line 2, in outer\n    inner()' in answer
    assert 'File "plpython/ulak/failing.py", line 5, in inner\n    raise ValueError("on line five")' in answer


def test_a_package_on_the_servers_path_does_not_stand_in_for_ours(db: DB, tmp_path: Path) -> None:
    (tmp_path / "ulak").mkdir(mode=0o755)
    (tmp_path / "ulak" / "__init__.py").write_text("")
    (tmp_path / "ulak" / "planted.py").write_text("")
    run_python(
        db, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom ulak import planted\nanswer = planted.__file__"
    )

    answer = run_python(
        db,
        f"{LOAD}import ulak\nanswer = ulak.__file__\n"
        "try:\n    import ulak.planted\n    answer = 'planted'\nexcept ModuleNotFoundError:\n    pass",
    )

    assert answer == "plpython/ulak/__init__.py"


@pytest.mark.parametrize("role", ["nobody", "ulak_application", "ulak_monitor", "ulak_admin", "ulak_node"])
def test_only_the_worker_may_load_it(connect: Connect, role: str) -> None:
    connect("ulak_worker").execute("select ulak_private.load_python()")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect(role).execute("select ulak_private.load_python()")


def test_only_sessions_ask_what_time_it_is() -> None:
    """They know whose clock counts. The watcher waits for the full minute, as pg_cron does."""
    folder = PROJECT / "plpython" / "ulak"
    asked = re.compile(r"\btime\.time\b|\bdatetime\.now\b|\butcnow\b|\btoday\b|\bgmtime\(\)|\blocaltime\(\)")

    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if asked.search(path.read_text())}

    assert found == {"sessions/backend.py", "entry_points.py", "node/session.py"}
