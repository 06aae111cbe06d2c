"""Findings of doctor() that are never reported."""

from __future__ import annotations

from support.cluster import PROJECT

from mutants.model import Mutant

SESSIONS = "sql/code/8_looking/doctor_sessions.sql"
VACUUM = "sql/code/8_looking/doctor_vacuum.sql"
HEALTH = "sql/code/8_looking/health_check.sql"
ADVICE = "sql/code/8_looking/advice.sql"
TESTS = "tests/db/test_doctor.py"
AT_ONCE = "tests/worker/test_told_at_once.py"


def instead(name: str, old: str, new: str, *tests: str, file: str = "") -> Mutant:
    """Other text, in the file of a subject of doctor() that has the old one."""
    files = [path for path in sorted((PROJECT / "sql/code/8_looking").glob("doctor*.sql")) if old in path.read_text()]
    return Mutant(name, file or str(files[0].relative_to(PROJECT)) if files else "", old, new, tests)


def never(name: str, condition: str, *tests: str, file: str = "") -> Mutant:
    """A condition that is never met."""
    return instead(name, condition, condition.replace("where ", "where false and ", 1), *tests, file=file)


MUTANTS = [
    never(
        "missing roles: after a restore",
        "where m.name is not null and to_regrole(quote_ident(m.name)) is null",
        "tests/upgrade/test_restore.py::test_roles_that_are_missing_after_a_restore_are_reported_first",
    ),
    never(
        "endpoints: none yet",
        "where not exists (select from ulak.endpoints)\n$sql$",
        f"{TESTS}::test_without_an_endpoint_doctor_says_what_to_do_first",
    ),
    never(
        "watch: the table is gone",
        "where t.table_id is null",
        "tests/db/test_watch.py::test_a_watch_whose_table_is_gone_is_named_by_doctor",
    ),
    never(
        "watch: the event type is gone",
        "where not exists (select from ulak.event_types e where e.name = w.event_type)",
        "tests/db/test_watch.py::test_a_watch_whose_event_type_is_gone_fails_no_writer_and_doctor_says_so",
    ),
    never(
        "watch: a column is gone",
        "where c.attname is null and t.table_id is not null",
        "tests/db/test_watch.py::test_a_dropped_column_is_left_out_and_doctor_says_so",
    ),
    never(
        "hosts: no longer allowed",
        "where a.allowed <> '' and e.enabled",
        f"{TESTS}::test_an_endpoint_whose_host_is_no_longer_allowed_is_reported",
        file="sql/code/8_looking/doctor_hosts.sql",
    ),
    never(
        "hosts: a secret is bound to none",
        "where ulak_private.stored_setting('require_bound_secrets')::boolean and e.enabled",
        f"{TESTS}::test_an_endpoint_that_needs_a_bound_secret_is_reported",
        file="sql/code/8_looking/doctor_hosts.sql",
    ),
    never(
        "cluster: restored from another",
        "where b.reason is not null\n$sql$",
        f"{TESTS}::test_a_restored_cluster_that_was_not_adopted_is_critical",
    ),
    never(
        "roles: one has what it shouldn't",
        "where not p.is_usual",
        "tests/security/test_role_maker.py::test_the_installer_may_accept_a_role_as_it_is_and_doctor_still_reports_it",
        "tests/security/test_worker.py::test_what_it_sets_for_its_own_sessions_is_named_by_doctor",
    ),
    never(
        "pg_cron: it can't serve",
        "where c.status = 'problem' and (p_alive",
        f"{TESTS}::test_a_pg_cron_that_can_not_serve_is_critical",
    ),
    instead(
        "pg_cron: jobs of another server",
        "from ulak_private.misplaced_jobs() m\n",
        "from ulak_private.misplaced_jobs() m where false\n",
        "tests/upgrade/test_restore.py::test_jobs_that_a_restore_brought_are_named_and_put_right_by_start",
    ),
    never(
        "pg_cron: a session waits for it",
        "where a.wait_event = 'ProcSignalBarrier'",
        f"{TESTS}::test_a_session_that_waits_for_pg_cron_is_reported",
    ),
    instead(
        "workers: a client library is missing",
        "from ulak_private.missing_clients() m\n",
        "from (select * from ulak_private.missing_clients() limit 0) m\n",
        f"{TESTS}::test_a_client_library_that_is_missing_is_reported",
    ),
    never(
        "workers: limited",
        "where w.limited_by is not null",
        "tests/worker/test_running.py::test_a_worker_that_may_open_few_files_says_so",
    ),
    never(
        "workers: runs that end with an error",
        "where w.broken_at > p_now - interval '1 hour'",
        f"{TESTS}::test_a_worker_whose_runs_end_with_an_error_is_named_with_the_error_for_an_hour",
    ),
    never(
        "workers: the clock of a node",
        "where abs(extract(epoch from w.clock_ahead)) > 1",
        "tests/nodes/test_clock.py::test_a_node_whose_clock_is_wrong_is_named",
    ),
    never(
        "workers: just started",
        "where p_alive = 0 and b.is_new",
        f"{TESTS}::test_workers_that_start_has_just_asked_for_are_not_missed_yet",
    ),
    never(
        "workers: none is alive",
        "where p_alive = 0 and not b.is_new",
        f"{TESTS}::test_no_worker_alive_is_critical",
        f"{AT_ONCE}::test_a_worker_that_was_killed_is_missed_though_its_row_is_young",
    ),
    Mutant(
        "workers: killed",
        HEALTH,
        "when p_worker.state = 'running' then ulak_private.has_backend(p_worker)",
        "when p_worker.state = 'running' then true",
        (f"{AT_ONCE}::test_a_worker_that_was_killed_is_missed_though_its_row_is_young",),
    ),
    never(
        "workers: no job for the next",
        "where p_alive > ulak_private.count_nodes(p_now)",
        f"{TESTS}::test_a_worker_that_will_not_be_started_again_is_reported",
    ),
    never(
        "workers: one went silent",
        "where w.state = 'lost' and p_alive > 0",
        f"{TESTS}::test_a_worker_that_went_silent_is_reported_beside_one_that_works",
    ),
    instead(
        "partitions",
        "from ulak_private.check_partitions(p_now) p",
        "from ulak_private.check_partitions(p_now) p where false",
        f"{TESTS}::test_a_missing_month_is_made",
        f"{TESTS}::test_a_default_partition_is_emptied",
    ),
    instead(
        "maintenance: never ran",
        "select 'run_maintenance() never ran'",
        "select null",
        f"{TESTS}::test_maintenance_that_never_ran_is_reported_until_it_has",
    ),
    instead(
        "maintenance: late",
        "r.started_at < p_now - interval '5 minutes' as is_late",
        "false as is_late",
        f"{TESTS}::test_maintenance_that_never_ran_is_reported_until_it_has",
    ),
    instead(
        "maintenance: failed",
        "coalesce(r.last_error_at >= r.started_at, false) as is_failed",
        "false as is_failed",
        f"{TESTS}::test_a_step_that_fails_is_critical_and_says_why",
    ),
    never(
        "circuit",
        "where h.circuit_state <> 'closed'\n    union all",
        f"{TESTS}::test_an_open_circuit_is_reported_at_once_and_critical_after_ten_minutes",
        f"{AT_ONCE}::test_a_circuit_that_opens_is_reported_at_once",
    ),
    never(
        "failing: refused, moved, blocked, timed out",
        "where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)",
        AT_ONCE,
    ),
    instead(
        "failing: what only somebody can mend is told at the first",
        "where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)",
        "where (h.last_success_at is null or h.failed_attempts >= 3)",
        f"{AT_ONCE}::test_an_answer_that_needs_a_person_is_reported_with_its_cause",
    ),
    instead(
        "failing: the first, while there was no success",
        "where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)",
        "where (a.is_lasting or h.failed_attempts >= 3)",
        f"{AT_ONCE}::test_the_first_failure_of_a_receiver_that_was_never_up_is_reported",
    ),
    instead(
        "failing: it goes on",
        "where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)",
        "where (a.is_lasting or h.last_success_at is null)",
        f"{AT_ONCE}::test_a_receiver_that_does_not_answer_in_time_is_reported_after_three_attempts",
    ),
    never(
        "backlog",
        "where h.enabled and h.due_since < p_now - interval '5 minutes'",
        f"{TESTS}::test_a_message_that_waits_for_a_long_time_is_reported",
    ),
    never(
        "disabled",
        "where not h.enabled and h.waiting > 0",
        f"{TESTS}::test_a_disabled_endpoint_that_holds_messages_is_reported",
    ),
    never(
        "queue: full",
        "where f.most > 0 and f.live > 0.8 * f.most",
        f"{TESTS}::test_a_queue_that_fills_up_is_reported_with_the_endpoint_that_fills_it",
    ),
    never(
        "queue: an endpoint is full",
        "where h.waiting >= h.max_pending",
        f"{TESTS}::test_an_endpoint_that_is_full_is_reported",
    ),
    instead(
        "dropped endpoint",
        "from ulak_private.orphaned_endpoints() o\n",
        "from ulak_private.orphaned_endpoints() o where false\n",
        f"{TESTS}::test_messages_of_a_dropped_endpoint_are_reported",
    ),
    never(
        "clock: it was set back",
        "where s.set_back_at is not null",
        "tests/db/test_clock.py::test_the_doctor_names_a_clock_that_was_set_back",
    ),
    never(
        "workers: a time-out ends each run",
        "where p_workers > 0 and t.timeout",
        f"{TESTS}::test_a_timeout_that_ends_every_run_of_a_worker_is_reported_until_start_has_lifted_it",
    ),
    instead(
        "ordering: a head is left lying",
        "cross join lateral ulak_private.stuck_ordering_keys(h.id, p_now) k",
        "cross join lateral ulak_private.stuck_ordering_keys(h.id, p_now) k where false",
        "tests/db/test_many_endpoints.py",
        "-k",
        "left_lying",
    ),
    never(
        "ordering: a head is parked",
        "where k.is_parked and k.changed_at",
        "tests/db/test_many_endpoints.py::test_the_doctor_names_a_first_message_that_is_parked",
    ),
    never(
        "ordering: a head is due later",
        "where not k.is_parked",
        f"{TESTS}::test_a_first_message_that_holds_up_its_ordering_key_for_hours_is_reported",
    ),
    never(
        "disable_after: it will be disabled",
        "where f.failures >= 20",
        "tests/db/test_disable_after.py::test_the_doctor_and_the_list_of_endpoints_count_down",
    ),
    never(
        "disable_after: it was disabled",
        "where not e.enabled and e.failing_told = 100",
        "tests/db/test_disable_after.py::test_the_doctor_names_what_was_disabled",
    ),
    never(
        "ordering: a dead letter holds its key",
        "where w.messages > 0",
        "tests/db/test_hold.py::test_the_doctor_names_a_letter_that_others_wait_for",
    ),
    never(
        "locks",
        "where l.locktype = 'advisory'",
        "tests/db/test_many_endpoints.py::test_the_doctor_names_who_holds_the_lock_of_a_circuit_breaker",
    ),
    instead(
        "dlq: it grows",
        "from growth n\n",
        "from growth n where false\n",
        f"{TESTS}::test_a_dead_letter_queue_that_grows_is_reported_with_its_commonest_cause",
    ),
    never(
        "dlq: letters wait for a decision",
        "where d.letters > 0 and not exists",
        f"{TESTS}::test_a_dead_letter_queue_that_grows_is_reported_with_its_commonest_cause",
    ),
    never(
        "dlq: soon to be deleted",
        "where d.status = 'failed'\n        order by d.archived_at\n        limit 1",
        f"{TESTS}::test_dead_letters_that_are_about_to_be_deleted_are_reported",
    ),
    never(
        "alerts: nobody is told",
        "where exists (select from unnest(p_facts) f where f.dead > 0)",
        f"{TESTS}::test_dead_letters_that_nobody_is_told_of_are_reported_and_an_installation_without_any_is_left_alone",
    ),
    instead(
        "alerts: nothing is dead",
        "where exists (select from unnest(p_facts) f where f.dead > 0)",
        "",
        f"{TESTS}::test_dead_letters_that_nobody_is_told_of_are_reported_and_an_installation_without_any_is_left_alone",
    ),
    never("settings", "where s.is_wrong", TESTS, "-k", "suspicious_setting or autovacuum or harness"),
    never(
        "settings: a parameter without effect",
        "where p.value <> ''",
        f"{TESTS}::test_a_parameter_of_the_server_that_has_no_effect_is_reported",
    ),
    instead(
        "settings: autovacuum",
        "not current_setting('autovacuum')::boolean",
        "false",
        f"{TESTS}::test_an_autovacuum_that_is_off_is_reported",
    ),
    instead(
        "signature: none",
        "where p.secret is null",
        "where false",
        f"{TESTS}::test_a_public_endpoint_that_is_weakly_protected_is_reported",
    ),
    instead(
        "signature: short",
        "where s.bytes < 24",
        "where false",
        f"{TESTS}::test_a_public_endpoint_that_is_weakly_protected_is_reported",
    ),
    never(
        "transport: no TLS",
        "where p.config ->> 'url' ~* '^http:'",
        f"{TESTS}::test_a_public_endpoint_that_is_weakly_protected_is_reported",
    ),
    never(
        "transport: not verified",
        "where p.config -> 'ssl_verify' = 'false'",
        f"{TESTS}::test_a_public_endpoint_that_is_weakly_protected_is_reported",
    ),
    never(
        "ordering key: a sender waits",
        "where not exists (select from waiting o where o.pid = b.pid)",
        TESTS,
        "-k",
        "sender_that_waits",
        file=SESSIONS,
    ),
    never(
        "session: idle in its transaction",
        "where a.datname = current_database()",
        f"{TESTS}::test_a_session_that_has_sent_and_is_idle_in_its_transaction_is_reported",
        file=SESSIONS,
    ),
    Mutant(
        "vacuum: held back",
        VACUUM,
        "from dead d\n    cross join blocker b",
        "from dead d\n    cross join blocker b where false",
        (TESTS, "-k", "holds_vacuum_back_is_named"),
    ),
    never(
        "vacuum: none",
        "where not exists (select from blocker)",
        f"{TESTS}::test_dead_rows_without_a_vacuum_are_reported",
        file=VACUUM,
    ),
    never(
        "vacuum: will be held back",
        "where not exists (select from dead)",
        f"{TESTS}::test_a_session_is_reported_after_an_hour_even_if_nothing_is_dead_yet",
        file=VACUUM,
    ),
    never(
        "vacuum: by a prepared transaction",
        "where x.database = current_database()",
        f"{TESTS}::test_a_prepared_transaction_that_holds_vacuum_back_is_named",
        file=VACUUM,
    ),
    never(
        "vacuum: by a slot",
        "where s.xmin is not null",
        f"{TESTS}::test_a_replication_slot_that_holds_vacuum_back_is_named",
        file=VACUUM,
    ),
    never(
        "vacuum: by a standby",
        "where r.backend_xmin is not null",
        f"{TESTS}::test_a_standby_that_holds_vacuum_back_is_named",
        file=VACUUM,
    ),
    Mutant(
        "health_check: goes by the findings",
        HEALTH,
        "coalesce(w.status, 'ok')",
        "'ok'",
        ("tests/db/test_health.py",),
    ),
    Mutant(
        "advice: the statement that allows a network",
        ADVICE,
        "('{blocked: }', true, 'its address is blocked', ulak_private.unblock(e.error)),",
        "('{blocked: }', true, 'its address is blocked', null),",
        (f"{AT_ONCE}::test_a_newcomers_first_message_to_loopback_says_what_to_run",),
    ),
]
