"""A cluster on which nothing is ready for ulak but its files."""

from __future__ import annotations

from support.cluster import Cluster, Settings


def bare(settings: Settings | None = None) -> Cluster:
    """As Debian makes one: nothing is preloaded, and the operating system's user may log in under its own name."""
    cluster = Cluster.create(in_memory=True)
    cluster.install(cluster.create_database("app"))
    file = cluster.data / "postgresql.conf"
    lines = file.read_text().splitlines(True)
    file.write_text("".join(line for line in lines if not line.startswith(("cron.", "shared_preload"))))
    cluster.configure(settings or {})
    (cluster.data / "pg_hba.conf").write_text(f"local all {cluster.user} trust\nlocal all all peer\n")
    cluster.restart()
    return cluster
