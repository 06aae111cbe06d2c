"""A cluster as a provider has it: its users are no superusers, and ulak comes as the plain script, without PL/Python.

With ULAK_PLAIN=1, tests/db run in it."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from support.cluster import PG_CONFIG, PROJECT, ROLES, Cluster, run

# The superuser is the provider's. A customer's role may create roles and databases, see everything and end sessions, and often has this
# name.
SUPERUSER, OWNER = "provider", "postgres"


def is_plain() -> bool:
    return bool(os.environ.get("ULAK_PLAIN"))


def build_script(folder: Path, project: Path = PROJECT) -> Path:
    run(["make", "-s", "-C", str(project), "sql", f"BUILD={folder}"])
    (script,) = folder.glob("ulak-plain-*.sql")
    return script


class ProvidersCluster(Cluster):
    """As its provider sees it, and without customers."""

    def __init__(self, folder: Path, pg_config: str = PG_CONFIG) -> None:
        super().__init__(folder, pg_config)
        self.user = self.superuser = SUPERUSER


class PlainCluster(ProvidersCluster):
    """Once it is made, everything is done as the owner."""

    @classmethod
    def create(cls, *arguments: Any, **options: Any) -> Self:
        cluster = super().create(*arguments, **options)
        assert isinstance(cluster, cls)
        cluster.execute(f"create role {OWNER} login createrole createdb")
        cluster.execute(f"grant pg_monitor, pg_signal_backend to {OWNER}")
        if home := cluster.has_pg_cron():
            cluster.execute(f"alter database {home} owner to {OWNER}")
            cluster.execute("create extension pg_cron", home)
            cluster.execute(f"grant usage on schema cron to {OWNER}", home)
        # For tests that count calls.
        cluster.execute(f"grant set on parameter track_functions to {OWNER}")
        cluster.user = OWNER
        return cluster

    def has_pg_cron(self) -> str | None:
        """The database that it lives in."""
        is_loaded = "pg_cron" in self.setting("shared_preload_libraries")
        return self.setting("cron.database_name") if is_loaded else None

    def as_superuser(self, statement: str, database: str = "postgres") -> None:
        with self.connect(database, SUPERUSER) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    def install(self, database: str, version: str | None = None) -> None:
        assert version is None
        self.run_script(database, build_script(self.folder / "plain"))
        if is_plain():
            # For tests that count what was read.
            self.as_superuser(f"grant execute on function pg_stat_reset() to {OWNER}", database)
        with self.connect(database) as connection:
            for role in ROLES:
                self.ensure_login(connection, f"test_{role}", member_of=role)
            self.ensure_login(connection, "nobody")

    def run_script(self, database: str, script: Path, role: str | None = None) -> str:
        """As the guide has it."""
        return run([self.bin / "psql", "-X", "-d", self.dsn(database, role), "-f", script])

    def uninstall(self, database: str) -> None:
        self.execute("drop schema ulak, ulak_private cascade", database)


# Tests of tests/db that can't pass without PL/Python or without a superuser: a file or a test, and why.
NO_PYTHON = "it is left out: PL/Python"
NO_WORKERS = "nodes deliver; see tests/plain/test_nodes.py"
EXTENSION = "of the extension; tests/plain has its counterpart where there is one"
SUPERUSERS = "the test itself needs a superuser"
JOB_ROLE = "jobs run as the owner; see tests/plain/test_start.py"
DOES_NOT_APPLY = {
    "db/test_report.py": NO_PYTHON,
    "db/test_curl.py": NO_PYTHON,
    "db/test_request.py::test_curl_shows_the_request_as_it_is_sent": NO_PYTHON,
    "db/test_many_endpoints.py::test_a_report_counts_all_endpoints_and_shows_fifty": NO_PYTHON,
    "db/test_top.py::test_no_look_scans_the_queue_or_the_dead_letters": NO_PYTHON,
    "db/test_send.py::test_a_send_loads_no_python": NO_PYTHON,
    "db/test_absurd_times.py::test_a_run_of_a_worker_has_an_end": NO_PYTHON,
    "db/test_adopt.py::test_a_restored_dump_holds_its_messages_until_it_is_adopted": EXTENSION,
    "db/test_adopt.py::test_a_dump_restored_into_its_own_cluster_goes_on": EXTENSION,
    "db/test_adopt.py::test_an_installation_that_took_itself_for_a_restore_is_completed_by_maintenance": EXTENSION,
    "db/test_partitions.py::test_months_are_ordinary_tables_and_no_members_of_the_extension": EXTENSION,
    "db/test_partitions.py::test_drop_extension_takes_months_along_that_were_made_later": EXTENSION,
    "db/test_fixes.py": EXTENSION,
    "db/test_console.py": SUPERUSERS,
    "db/test_compilation.py": SUPERUSERS,
    "db/test_claim_cost.py::*[none": SUPERUSERS,
    "db/test_send.py::test_a_plain_send_asks_nothing_but_its_insert": SUPERUSERS,
    "db/test_doctor.py::test_a_standby_that_holds_vacuum_back_is_named": SUPERUSERS,
    "db/test_doctor.py::test_a_replication_slot_that_holds_vacuum_back_is_named": SUPERUSERS,
    "db/test_doctor.py::test_a_parameter_of_the_server_that_has_no_effect_is_reported": SUPERUSERS,
    "db/test_doctor.py::test_a_fresh_installation_lacks_an_endpoint_alone": EXTENSION,
    "db/test_doctor.py::test_a_client_library_that_is_missing_is_reported": NO_WORKERS,
    "db/test_doctor.py::test_no_worker_alive_is_critical": NO_WORKERS,
    "db/test_doctor.py::test_jobs_that_can_not_run_are_distinguished_from_missing_ones": NO_WORKERS,
    "db/test_explain.py::test_without_a_worker_nothing_happens_and_the_fix_is_named": NO_WORKERS,
    "db/test_doctor.py::test_a_worker_that_will_not_be_started_again_is_reported": NO_WORKERS,
    "db/test_doctor.py::test_a_timeout_that_ends_every_run_of_a_worker_is_reported_until_start_has_lifted_it": NO_WORKERS,
    "db/test_doctor.py::test_workers_that_start_has_just_asked_for_are_not_missed_yet": NO_WORKERS,
    "db/test_recurring.py::test_a_schedule_is_one_job_that_its_name_replaces_and_ends": JOB_ROLE,
    "db/test_recurring.py::test_where_pg_cron_lives_in_another_database_the_caller_is_told_what_to_run": JOB_ROLE,
    "db/test_watch.py::test_what_replication_applies_is_no_event": SUPERUSERS,
    "db/test_recurring.py::test_without_pg_cron_the_error_says_how_to_get_it": SUPERUSERS,
}


def reason_to_skip(nodeid: str) -> str | None:
    """An entry is a file, a test with all its parameters, or a pattern."""
    name = nodeid.rpartition("tests/")[2]
    for entry, reason in DOES_NOT_APPLY.items():
        if (
            name.partition("[")[0] == entry
            or name.partition("::")[0] == entry
            or fnmatch(name, entry.replace("[", "[[]") + "*")
        ):
            return reason
    return None
