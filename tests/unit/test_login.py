"""Logging in by libpq: here only what fails, tests/worker has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from ulak.sessions import login


def test_the_reason_of_a_failure_is_libpqs_own(tmp_path: Path) -> None:
    with pytest.raises(login.LoginError, match="No such file or directory"):
        login.log_in({"host": str(tmp_path), "port": "5", "user": "nobody", "dbname": "none"})


def test_a_missing_libpq_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libnowhere.so.5")

    with pytest.raises(login.LoginError, match=r"libnowhere\.so\.5 can't be loaded"):
        login.log_in({"host": "/"})
