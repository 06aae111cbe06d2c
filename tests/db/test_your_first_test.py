"""The test that tests/README.md begins with runs as it is printed, and fails once the code is broken as the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.cluster import PROJECT
from support.queue import Queue

SECTION = (PROJECT / "tests/README.md").read_text().partition("## Your first test")[2].partition("\n## ")[0]


@pytest.fixture
def printed() -> Callable[[Queue], None]:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    return test  # type: ignore[no-any-return]


def test_the_printed_test_passes(queue: Queue, printed: Callable[[Queue], None]) -> None:
    printed(queue)

    assert queue.column("select attempts from ulak.queue") == [2]


def test_the_printed_test_fails_on_broken_code(queue: Queue, printed: Callable[[Queue], None]) -> None:
    ((file, old, new),) = re.findall(r"in `(sql/\S+)`, change `(.+?)` to `(.+?)`", SECTION)
    text = (PROJECT / file).read_text()
    assert text.count(old) == 1
    queue.db.execute(text.replace(old, new))  # type: ignore[arg-type]

    with pytest.raises(AssertionError):
        printed(queue)
