"""Debian's packages, unpacked instead of installed: installing some of them would start a server on this machine."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path

from support.cluster import WORK, run


def unpacked(package: str) -> Path:
    """The folder that stands for / of the package, kept for the next time."""
    return unpacked_together(package, [package])


def unpacked_together(name: str, packages: Sequence[str]) -> Path:
    """The same for packages that need each other."""
    folder = WORK / f"{name}-package"
    WORK.mkdir(parents=True, exist_ok=True)
    # Two processes may want them at once.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(folder, packages)
    return folder


def _unpack(folder: Path, packages: Sequence[str]) -> None:
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    run(["apt-get", "download", "-q", *packages], cwd=fresh)
    for file in fresh.glob("*.deb"):
        run(["dpkg", "-x", str(file), str(fresh)])
    fresh.rename(folder)


def version(package: str) -> str:
    """Of an unpacked one."""
    (file,) = unpacked(package).glob("*.deb")
    return file.name.split("_")[1].replace("%3a", ":")
