"""Under which circumstances a run measured: figures without them say nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pycurl
from support.cluster import PROJECT, Cluster

# Beside those that differ from the server's own defaults, the ones that decide what a commit costs.
SETTINGS = """
    select jsonb_object_agg(name, current_setting(name)) from pg_settings
    where name in ('fsync', 'full_page_writes', 'synchronous_commit', 'wal_sync_method', 'autovacuum')
        or source = 'configuration file' and name <> all (%s)
"""
# Where things are says nothing about speed.
PLACES = [
    "cron.host",
    "extension_control_path",
    "extension_destdir",
    "port",
    "unix_socket_directories",
    "listen_addresses",
    "log_line_prefix",
]


def circumstances(cluster: Cluster, scale: float) -> dict[str, Any]:
    with cluster.connect() as db:
        version, settings = db.execute(f"select version(), ({SETTINGS})", [PLACES]).fetchone() or ("", {})  # type: ignore[arg-type]
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "scale": scale,
        "ulak": extension_version(),
        "commit": commit(),
        "postgresql": version,
        "pycurl": pycurl.version,
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": load(),
        "settings": settings,
    }


def load() -> list[float]:
    return [round(each, 2) for each in os.getloadavg()]


def commit() -> str | None:
    """None where there is no git or no repository. The project may belong to another user."""
    command = ["git", "-c", f"safe.directory={PROJECT}", "-C", str(PROJECT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def extension_version() -> str:
    (line,) = [
        line
        for line in (PROJECT / "control/ulak.control").read_text().splitlines()
        if line.startswith("default_version")
    ]
    return line.split("'")[1]


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def sentence(found: dict[str, Any]) -> str:
    """The ones that README names."""
    settings, loads = found["settings"], found["load"]
    libraries = " ".join(found["pycurl"].split()[:2]).replace("/", " ")
    return (
        f"Measured on {found['began'][:10]} at commit {found['commit'] or 'unknown'}, scale {found['scale']:g}: "
        f"PostgreSQL {found['postgresql'].split()[1]}, {libraries}, {found['cores']} cores ({found['processor']}), "
        f"load {loads[0]} at the beginning; fsync {settings['fsync']}, full_page_writes {settings['full_page_writes']}, "
        f"shared_buffers {settings['shared_buffers']}."
    )
