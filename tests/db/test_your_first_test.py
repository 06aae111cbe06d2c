"""The test that tests/README.md begins with runs as it is printed."""

from __future__ import annotations

import re
from typing import Any

from support.cluster import PROJECT
from support.queue import Queue


def test_the_printed_test_passes(queue: Queue) -> None:
    section = (PROJECT / "tests/README.md").read_text().partition("## Your first test")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}

    exec(code, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test(queue)

    assert queue.column("select status from ulak.queue") == ["pending"]
