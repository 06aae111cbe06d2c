"""Builds the plain script: ulak without PL/Python, for servers where nobody of yours is a superuser (`make sql`).

It is made of the same files as the extension, by three rules:

- a function that sql/plain/in_place_of.sql has, too, is taken from there;
- any other PL/Python function keeps its name and parameters, and says that it needs PL/Python;
- what only CREATE EXTENSION or a superuser may do is left out.

The Python itself is in it as data: nodes fetch it from ulak_private.python_source().
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SQL = Path(__file__).resolve().parent
# Public functions that need PL/Python: the function that is written in it, the reason, and what to use instead.
LEFT_OUT = {
    "report": (
        "ulak_private.draw_report",
        "Python draws the report.",
        "doctor(), top() and explain() tell what it would.",
    ),
    "ping": (
        "ulak_private.ping",
        "A request that the server itself sends is made in Python.",
        "Send a message: a node delivers it, and explain() tells what came of it.",
    ),
    "curl": (
        "ulak_private.curl",
        "What it shows is made by the Python of the workers.",
        "A receiver of your own shows what a node sends.",
    ),
    "run_worker": ("ulak.run_worker", "The worker in the database is Python.", "Nodes deliver: docker/node/worker.py."),
}
# Of any other PL/Python function. Its callers are replaced by sql/plain/in_place_of.sql.
OF_WORKERS = (
    "This is a part of the workers in the database, which are Python.",
    "Nodes deliver: docker/node/worker.py.",
)

ROUTINE = re.compile(
    r"^create or replace (?:function|procedure) (?P<name>ulak(?:_private)?\.\w+)\((?P<head>.*?)"
    r"^as (?P<tag>\$\w*\$)(?P<body>.*?)(?P=tag);\n",
    re.MULTILINE | re.DOTALL,
)
LANGUAGE = re.compile(r"^language (\w+)\n", re.MULTILINE)
# Parameters that only a superuser may set, and so may have in a function.
SUPERUSERS = re.compile(r"^set (?:log_error_verbosity|log_min_error_statement) = .*\n", re.MULTILINE)
# What CREATE EXTENSION reads, and psql would run.
ECHO = re.compile(r"^\\echo Use .*\n", re.MULTILINE)
CONFIG_DUMP = re.compile(r"^select pg_catalog\.pg_extension_config_dump\(.*?\);\n", re.MULTILINE | re.DOTALL)

STUB = """
begin
    raise exception 'this needs PL/Python, and ulak was installed here without it'
        using
            errcode = '0A000',
            detail = '@reason@',
            hint = '@instead@';
end
"""


def signature(head: str) -> str:
    """Parameters and result: what stands before the language."""
    return " ".join(LANGUAGE.split(head)[0].split())


class Builder:
    def __init__(self, version: str) -> None:
        self.version = version
        self.replacements = {found["name"]: found for found in ROUTINE.finditer(self.own("in_place_of.sql"))}
        self.replaced: list[str] = []

    def own(self, name: str) -> str:
        return self.filled((SQL / "plain" / name).read_text("utf-8"))

    def filled(self, text: str) -> str:
        *others, last = (f"{name}()" for name in LEFT_OUT)
        text = text.replace("@version@", self.version).replace("@left_out@", f"{', '.join(others)} and {last}")
        return text.replace("@left_out_names@", ", ".join(f"'{name}'" for name in LEFT_OUT))

    def plain(self, text: str) -> str:
        """A part of the extension's script as it is in the plain one."""
        text = CONFIG_DUMP.sub("", ECHO.sub("", text))
        return SUPERUSERS.sub("", ROUTINE.sub(self.plain_routine, text))

    def plain_routine(self, found: re.Match[str]) -> str:
        if replacement := self.replacements.get(found["name"]):
            if signature(replacement["head"]) != signature(found["head"]):
                sys.exit(f"sql/plain: {found['name']} has another signature in sql/code")
            self.replaced.append(found["name"])
            return replacement[0]
        if LANGUAGE.search(found["head"])[1] != "plpython3u":  # type: ignore[index]
            return found[0]
        head = found[0][: found.start("tag") - found.start()].replace("language plpython3u", "language plpgsql")
        return f"{head}$plpgsql${self.stub(found['name'])}$plpgsql$;\n"

    def stub(self, name: str) -> str:
        texts = {routine: (reason, instead) for routine, reason, instead in LEFT_OUT.values()}
        reason, instead = texts.get(name, OF_WORKERS)
        return STUB.replace("@reason@", reason).replace("@instead@", instead)

    def joined(self, paths: list[Path]) -> str:
        return "".join(self.plain(path.read_text("utf-8")) for path in paths)

    def only_if(self, condition: str, text: str) -> str:
        return f"select {condition} as ulak_is_due \\gset\n\\if :ulak_is_due\n\n{text}\n\\endif\n\n"

    def script(self, schema: list[Path], replayed: list[Path], upgrades: list[Path]) -> str:
        steps = {earlier(path): path for path in sorted(upgrades, key=lambda path: numbers(earlier(path)))}
        parts = [self.own("begin.sql").replace("@versions@", quoted([*steps, self.version]))]
        parts.append(
            self.only_if(
                "current_setting('ulak.installed') = ''",
                self.joined([path for path in schema if path.name != "90_dump.sql"]),
            )
        )
        for number, path in enumerate(steps.values(), 1):
            # Also after the steps before it.
            passed = quoted([*steps][:number])
            parts.append(self.only_if(f"current_setting('ulak.installed') in ({passed})", self.joined([path])))
        parts.append(self.joined(replayed))
        parts.append(self.own("end.sql"))
        if unknown := set(self.replacements) - set(self.replaced):
            sys.exit(f"sql/plain replaces what sql/code doesn't have: {', '.join(sorted(unknown))}")
        return "".join(parts)


def earlier(step: Path) -> str:
    """The version that a step starts from."""
    return step.name.split("--")[0]


def quoted(versions: list[str]) -> str:
    return ", ".join(f"'{version}'" for version in versions)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def main(version: str, files: list[str]) -> None:
    paths = [Path(file) for file in files]
    schema, upgrades = ([path for path in paths if path.parent.name == folder] for folder in ("schema", "upgrade"))
    replayed = [path for path in paths if path not in schema and path not in upgrades]
    sys.stdout.write(Builder(version).script(schema, replayed, upgrades))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    main(sys.argv[1], sys.argv[2:])
