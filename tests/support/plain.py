"""A cluster as a provider has it: its users are no superusers, and ulak comes as the plain script, without PL/Python.

With ULAK_PLAIN, the tests run in it: 15 to 18 is a server of tests/servers.txt, which has no pg_cron (`make test-plain`); any other value, as
in tests/plain/test_db.py, is the server that the other tests run on."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from support.cluster import DEFAULTS, PG_CONFIG, PROJECT, ROLES, Cluster, Settings, run

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

    def prepare(self, project: Path, pg_config: str) -> Settings:
        if (Path(run([pg_config, "--pkglibdir"]).strip()) / "pg_cron.so").exists():
            return DEFAULTS
        return {name: value for name, value in DEFAULTS.items() if not name.startswith(("cron.", "shared_preload"))}


class PlainCluster(ProvidersCluster):
    """Once it is made, everything is done as the owner."""

    @classmethod
    def create(cls, *arguments: Any, **options: Any) -> Self:
        cluster = super().create(*arguments, **options)
        assert isinstance(cluster, cls)
        cluster.execute(f"create role {OWNER} login createrole createdb")
        cluster.execute(f"grant pg_monitor, pg_signal_backend to {OWNER}")
        if home := cluster.home_of_pg_cron():
            cluster.execute(f"alter database {home} owner to {OWNER}")
            cluster.execute("create extension pg_cron", home)
            cluster.execute(f"grant usage on schema cron to {OWNER}", home)
        # For tests that count calls.
        cluster.execute(f"grant set on parameter track_functions to {OWNER}")
        cluster.user = OWNER
        return cluster

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


def create_cluster(**options: Any) -> Cluster:
    """Of the kind that the tests run on."""
    return (PlainCluster if is_plain() else Cluster).create(**options)


# Tests that can't pass without PL/Python or without a superuser: a file or a test, and why.
NO_REPORT = "Python draws the report"
NO_CURL = "curl() shows the request, by the Python that makes it; see tests/plain/test_nodes.py for what is sent"
NO_PYTHON = "it is about PL/Python"
NO_WORKERS = "nodes deliver; see tests/plain/test_nodes.py"
EXTENSION = "of the extension; tests/plain has its counterpart where there is one"
SUPERUSERS = "the test itself needs a superuser"
FILES = "only a superuser may read the server's files"
PROGRAMS = "these servers have no pg_dump and no pg_upgrade"
COMPARED = "these servers can't have the extension"
JOB_ROLE = "jobs run as the owner; see tests/plain/test_start.py"
DOES_NOT_APPLY = {
    "db/test_report.py": NO_REPORT,
    "db/test_many_endpoints.py::test_a_report_counts_all_endpoints_and_shows_fifty": NO_REPORT,
    "db/test_top.py::test_no_look_scans_the_queue_or_the_dead_letters": NO_REPORT,
    "db/test_curl.py": NO_CURL,
    "db/test_request.py::test_curl_shows_the_request_as_it_is_sent": NO_CURL,
    "db/test_subscription_body.py::test_the_most_specific_subscription_with_a_body_decides_and_otherwise_the_endpoint": NO_CURL,
    "db/test_subscription_body.py::test_a_message_that_was_not_published_has_the_body_of_the_endpoint": NO_CURL,
    "db/test_subscription_body.py::test_each_change_reaches_workers_as_a_change_of_the_config_does": NO_CURL,
    "db/test_subscription_body.py::test_an_endpoint_has_one_body_for_an_event_type": NO_CURL,
    "db/test_template.py::test_curl_shows_the_body_and_masks_a_secret_in_it": NO_CURL,
    "db/test_send.py::test_a_send_loads_no_python": NO_PYTHON,
    "db/test_absurd_times.py::test_a_run_of_a_worker_has_an_end": NO_PYTHON,
    "db/test_adopt.py::test_a_restored_dump_holds_its_messages_until_it_is_adopted": EXTENSION,
    "db/test_adopt.py::test_a_dump_restored_into_its_own_cluster_goes_on": EXTENSION,
    "db/test_adopt.py::test_an_installation_that_took_itself_for_a_restore_is_completed_by_maintenance": EXTENSION,
    "db/test_adopt.py::test_a_cluster_that_was_recovered_to_a_target_holds_its_messages_until_it_is_adopted": FILES,
    "db/test_doctor.py::test_a_line_of_the_servers_files_that_has_no_effect_is_reported": FILES,
    "db/test_doctor.py::test_a_pg_cron_that_can_not_serve_is_critical": SUPERUSERS,
    "db/test_doctor.py::test_a_session_that_waits_for_pg_cron_is_reported": SUPERUSERS,
    "db/test_doctor.py::test_an_autovacuum_that_is_off_is_reported": SUPERUSERS,
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
    # By `make test-plain`: the others of tests/plain run there, too.
    "plain/test_db.py": "the tests of tests/db run beside it",
    "plain/test_backup.py": PROGRAMS,
    "plain/test_script.py::test_every_table_is_that_of_the_extension": COMPARED,
    "plain/test_script.py::test_every_function_is_there_with_its_parameters_its_comment_and_its_grants": COMPARED,
    "plain/test_script.py::test_most_functions_are_those_of_the_extension": COMPARED,
    "plain/test_script.py::test_the_python_that_nodes_fetch_is_the_extensions": COMPARED,
    "plain/test_script.py::test_where_the_extension_is_installed_it_is_refused": COMPARED,
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
