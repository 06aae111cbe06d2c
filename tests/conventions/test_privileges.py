"""The role matrix: each role against each function and table, cell by cell. Nothing is open to PUBLIC."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from support.cluster import PROJECT, ROLES

DB = psycopg.Connection[Any]

# What each role may execute. Whatever is not listed for a role, it may not. _name stands for ulak_private.name.
FUNCTIONS = {
    "ulak_application": """
        send send_with_options send_batch send_batch_with_priority send_messages send_many publish publish_batch sent
        cancel cancel_by_key reschedule reprioritise
        message_status find_messages await_delivery _await_delivery explain mark_handled setting help _shown_config public_keys
    """,
    "ulak_consumer": """
        claim heartbeat complete fail release work listen
        heartbeat_many complete_many fail_many release_many retry_delay mark_handled setting help
    """,
    "ulak_monitor": """
        dlq_summary message_status find_messages find_letters retry_delay setting help public_keys
        get_endpoint_health get_worker_status health health_check metrics metrics_text doctor explain history report
        top _retry_schedule _shown_config
    """,
    "ulak_admin": """
        create_endpoint alter_endpoint drop_endpoint grant_endpoint revoke_endpoint grant_event_type revoke_event_type enable_endpoint disable_endpoint validate_endpoint_config
        apply config set_secret rotate_secret drop_secret configure setting reset_circuit_breaker update_circuit_breaker
        create_event_type alter_event_type drop_event_type subscribe alter_subscription unsubscribe
        watch unwatch _add_watch _remove_watch _watch_triggers _watched_tables _publish_changes _row_security_applies
        _apply_config _apply_watch _refuse_document _refusal _texts
        send send_with_options send_batch send_batch_with_priority send_messages send_many publish publish_batch sent message_status mark_handled
        claim heartbeat complete fail release work listen
        heartbeat_many complete_many fail_many release_many retry_delay recover_stale_messages mark_expired_messages
        cancel cancel_by_key reschedule reprioritise public_keys purge discard retry_now find_messages find_letters replay_plan await_delivery _await_delivery
        redrive redrive_message redrive_endpoint redrive_all archive_single_to_dlq dlq_summary cleanup_dlq
        archive_completed_messages maintain_archive_partitions cleanup_old_archive_partitions
        replay_message replay_range cleanup_event_log cleanup_endpoint_stats cleanup_inbox adopt
        schedule unschedule start stop ping run_worker run_maintenance _maintenance_step _caller _clock _check_interval _is_adopted _leave_read_only
        get_endpoint_health get_worker_status health health_check metrics metrics_text doctor explain history report curl help
        top _retry_schedule _shown_config
    """,
    "ulak_worker": """
        claim heartbeat complete fail release work listen
        heartbeat_many complete_many fail_many release_many retry_delay recover_stale_messages mark_expired_messages
        update_circuit_breaker mark_handled setting help
        run_worker run_maintenance _maintenance_step _clock _check_interval _is_adopted _leave_read_only
        _claim _read_claimed _settle_many _release_many _heartbeat_many _endpoint_configs _blocked_endpoints _sweep
        _check_run _enter_worker_session _take_worker_slot _leave_worker_slot _register_worker _unregister_worker _worker_parameters
        _send_recurring _version _stamp_of _worker_stamp _worker_options _worker_check _worker_report _is_poller
        _is_wanted _watch_workers _missing_workers _login_parameters _await_schedule _note_limit _suspicion _log _warn
        _worker_turn _claim_new _listen _protocol_facts _worker_protocols
        _load_python _python_source _python_stamp
    """,
    "ulak_node": """
        _python_source _python_stamp _python_loader _version _stamp_of _worker_stamp
        _enter_node_session _node_parameters _worker_parameters _take_node_slot _leave_node_slot _unregister_worker
        _worker_options _note_limit _suspicion _worker_check _worker_report _is_poller _sweep _log
        _claim _worker_turn _claim_new _read_claimed _settle_many _release_many _heartbeat_many _endpoint_configs _blocked_endpoints
        _protocol_facts _worker_protocols _listen _is_adopted
    """,
}

# What each role may do to tables, views and sequences. ulak_private.secrets is in none of the lists.
RELATIONS = {
    "ulak_application": {
        "endpoint_list": "select",
        "settings": "select",
    },
    "ulak_consumer": {},
    "ulak_monitor": {
        "attempts": "select",
        "backlog_samples": "select",
        "endpoint_list": "select",
        "endpoint_stats": "select",
        "endpoint_totals": "select",
        "event_log": "select",
        "maintenance_status": "select",
        "retry_schedule": "select",
        "settings": "select",
        "top": "select",
        "traffic": "select",
        "workers": "select",
    },
    "ulak_admin": {
        "archive": "select",
        "attempts": "select",
        "backlog_samples": "select",
        "dlq": "select",
        "messages": "select",
        "endpoint_grants": "select",
        "event_type_grants": "select",
        "endpoint_list": "select",
        "endpoint_stats": "select",
        "endpoint_totals": "select",
        "endpoints": "select update(columns)",
        "event_log": "select",
        "event_types": "select",
        "handled": "select",
        "maintenance_status": "select",
        "queue": "select",
        "retry_schedule": "select",
        "setting_values": "select",
        "settings": "select",
        "subscriptions": "select",
        "subscription_list": "select",
        "recurring": "select",
        "recurring_list": "select",
        "watches": "select",
        "watch_list": "select",
        "top": "select",
        "traffic": "select",
        "workers": "select",
    },
    "ulak_node": {
        "queue_id_seq": "select",
    },
    "ulak_worker": {
        "maintenance_status": "select",
        "queue_id_seq": "select",
    },
}

CELLS_OF_FUNCTIONS = """
    select distinct role, case when pronamespace = 'ulak_private'::regnamespace then '_' else '' end || proname
    from pg_proc, unnest(%s::text[]) as role
    where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and has_function_privilege(role, oid, 'execute')
"""

# A privilege on some columns only is written as select(columns).
CELLS_OF_RELATIONS = """
    select role, relname, string_agg(privilege || case when whole then '' else '(columns)' end, ' ' order by privilege)
    from pg_class
    cross join unnest(%s::text[]) as role
    cross join unnest(
        case relkind when 'S' then array['usage', 'select', 'update']
        else array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger'] end
    ) as privilege
    cross join lateral (
        select case relkind when 'S' then has_sequence_privilege(role, oid, privilege)
        else has_table_privilege(role, oid, privilege) end
    ) as w (whole)
    where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
        and relkind in ('r', 'p', 'v', 'm', 'S')
        and (
            whole
            or relkind <> 'S'
            and privilege in ('select', 'insert', 'update', 'references')
            and has_any_column_privilege(role, oid, privilege)
        )
    group by 1, 2
"""


def differences(expected: set[Any], found: set[Any]) -> list[str]:
    granted = [f"granted, but not in the matrix: {' '.join(cell)}" for cell in sorted(found - expected)]
    missing = [f"in the matrix, but not granted: {' '.join(cell)}" for cell in sorted(expected - found)]
    return granted + missing


def test_each_role_executes_exactly_its_functions(db: DB) -> None:
    expected = {(role, name) for role, names in FUNCTIONS.items() for name in names.split()}

    found = set(db.execute(CELLS_OF_FUNCTIONS, [list(ROLES)]).fetchall())

    assert differences(expected, found) == []


def test_each_role_touches_exactly_its_tables(db: DB) -> None:
    expected = {(role, name, cell) for role, cells in RELATIONS.items() for name, cell in cells.items()}

    found = set(db.execute(CELLS_OF_RELATIONS, [list(ROLES)]).fetchall())

    assert differences(expected, found) == []


def test_the_roles_are_not_members_of_each_other(db: DB) -> None:
    """Otherwise a grant to one of them would quietly reach another."""
    query = """
        select member::regrole::text, roleid::regrole::text from pg_auth_members
        where member = any (%s::regrole[]) or roleid = any (%s::regrole[]) and member::regrole::text not like 'test%%'
    """

    assert db.execute(query, [list(ROLES), list(ROLES)]).fetchall() == []


def test_nobody_is_asked_to_be_a_member_where_the_rights_are_meant() -> None:
    """A member may inherit nothing, and since PostgreSQL 16 the role that makes another one is such a member of it. The rights are usage."""
    tracked = (
        path for part in ("sql", "control", "docker", "plpython", "tests") for path in (PROJECT / part).rglob("*")
    )
    texts = {
        str(path.relative_to(PROJECT)): path for path in tracked if path.is_file() and "released" not in path.parts
    }

    found = {
        name
        for name, path in texts.items()
        if re.search(r"'[m]ember( with [a-z ]+)?'", path.read_text("utf-8", "ignore"), re.IGNORECASE)
    }

    assert found == set()


# Workers, nodes and procedures that commit call private functions by name.
INSIDE = {"ulak_admin", "ulak_application", "ulak_node", "ulak_worker"}


def test_each_role_may_use_its_schemas_and_none_may_create_in_them(db: DB) -> None:
    query = """
        select
            role,
            has_schema_privilege(role, 'ulak', 'usage'),
            has_schema_privilege(role, 'ulak_private', 'usage'),
            has_schema_privilege(role, 'ulak', 'create') or has_schema_privilege(role, 'ulak_private', 'create')
        from unnest(%s::text[]) as role
    """

    assert sorted(db.execute(query, [[*ROLES, "nobody"]]).fetchall()) == [
        ("nobody", False, False, False),
        *((role, True, role in INSIDE, False) for role in sorted(ROLES)),
    ]


def test_the_public_schema_holds_nothing_private(db: DB) -> None:
    """Functions, tables and views that a role may use, and what belongs to them. setting_values is read as the view settings."""
    found = db.execute(
        """
        select 'function ' || oid::regprocedure
        from pg_proc
        where pronamespace = 'ulak'::regnamespace
            and (proname like E'\\\\_%%' or not has_function_privilege('ulak_admin', oid, 'execute'))
        union all
        select 'relation ' || oid::regclass
        from pg_class
        where relnamespace = 'ulak'::regnamespace
            and relkind not in ('i', 'I', 'S')
            and (relname like E'\\\\_%%' or relispartition or not has_table_privilege('ulak_admin', oid, 'select'))
        union all
        -- The ids of public tables and of messages.
        select 'sequence ' || oid::regclass
        from pg_class
        where relnamespace = 'ulak'::regnamespace and relkind = 'S' and relname not like '%%_id_seq'
        union all
        select 'type ' || t.oid::regtype
        from pg_type t
        left join pg_class c on c.oid = t.typrelid
        where t.typnamespace = 'ulak'::regnamespace and t.typelem = 0 and (c.oid is null or c.relkind = 'c')
        """,
        [],
    ).fetchall()

    assert [line for (line,) in found] == []


def test_nothing_is_granted_to_public(db: DB) -> None:
    """A null acl means the default, which for functions and types is: everybody."""
    granted = db.execute(
        """
        with object (name, acl) as (
            select 'schema ' || nspname, coalesce(nspacl, acldefault('n', nspowner))
            from pg_namespace where nspname in ('ulak', 'ulak_private')
            union all
            select 'function ' || oid::regprocedure, coalesce(proacl, acldefault('f', proowner))
            from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')
            union all
            select 'relation ' || oid::regclass,
                coalesce(relacl, acldefault(case relkind when 'S' then 's' else 'r' end::"char", relowner))
            from pg_class where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and relkind in ('r', 'p', 'v', 'm', 'S')
            union all
            select 'column ' || attrelid::regclass || '.' || attname, attacl
            from pg_attribute join pg_class on pg_class.oid = attrelid where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
        )
        select name || ': ' || privilege_type from object, aclexplode(acl) where grantee = 0 order by 1
        """
    ).fetchall()

    assert [line for (line,) in granted] == []


def test_no_grant_can_be_passed_on(db: DB) -> None:
    granted = db.execute(
        """
        select oid::regprocedure::text, grantee::regrole::text
        from pg_proc, aclexplode(proacl)
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and is_grantable and grantee <> proowner
        union all
        select oid::regclass::text, grantee::regrole::text
        from pg_class, aclexplode(relacl)
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and is_grantable and grantee <> relowner
        """
    ).fetchall()

    assert granted == []
