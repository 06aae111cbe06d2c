"""The databases of a cluster are made and dropped by pytest-postgresql's janitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql
from pytest_postgresql.janitor import DatabaseJanitor

if TYPE_CHECKING:
    from support.cluster import Cluster


class Janitor(DatabaseJanitor):
    """Drops the database when its block ends, even if sessions are still connected. It is a copy of the template's files: through the WAL,
    the server's default, a clone takes half as long again (tests/README.md). Options are those of CREATE DATABASE."""

    def __init__(
        self, cluster: Cluster, name: str, template: str | None = None, options: str = "", *, as_template: bool = False
    ) -> None:
        super().__init__(
            user=cluster.superuser,
            host=cluster.host,
            port=cluster.port,
            dbname=name,
            template_dbname=template or "template0",
            as_template=as_template,
        )
        if cluster.user != cluster.superuser:
            options += f" owner {cluster.user}"
        self._options = sql.SQL(f" strategy file_copy {options}")  # type: ignore[arg-type]

    def _build_create_database_sql(self) -> sql.Composed:
        return super()._build_create_database_sql() + self._options
