-- All grants in one list. Nothing is granted to PUBLIC.

-- An upgrade has to remove grants that this version lacks, so it starts by revoking everything.
do $plpgsql$
declare
    v_roles constant text := 'public, ulak_admin, ulak_application, ulak_consumer, ulak_monitor, ulak_node, ulak_worker';
    v_schema text;
    v_kind text;
begin
    foreach v_schema in array array['ulak', 'ulak_private'] loop
        execute format('revoke all on schema %I from %s', v_schema, v_roles);
        foreach v_kind in array array['tables', 'sequences', 'routines'] loop
            execute format('revoke all on all %s in schema %I from %s', v_kind, v_schema, v_roles);
        end loop;
    end loop;
end
$plpgsql$;

grant usage on schema ulak to ulak_admin, ulak_application, ulak_consumer, ulak_monitor, ulak_node, ulak_worker;
-- Procedures that commit, workers and nodes call private functions by name, with the rights of their callers.
grant usage on schema ulak_private to ulak_admin, ulak_application, ulak_node, ulak_worker;

-- An administrator may call every public function. The others get what is listed; a name stands for all its signatures.
-- In the private schema, only the listed functions are granted.
do $plpgsql$
declare
    v_schema text;
    v_role text;
    v_names text[];
    v_unknown text;
    v_routine text;
begin
    for v_schema, v_role, v_names in
        values
            ('ulak', 'ulak_admin', (
                select array_agg(distinct p.proname::text)
                from pg_proc p
                where p.pronamespace = 'ulak'::regnamespace and p.proname not like E'\\_%'
            )),
            ('ulak', 'ulak_application', array[
                'send', 'send_with_options', 'send_batch', 'send_batch_with_priority', 'send_messages', 'send_many',
                'publish', 'publish_batch', 'sent',
                'cancel', 'cancel_by_key', 'reschedule', 'reprioritise',
                'message_status', 'find_messages', 'await_delivery', 'explain', 'mark_handled', 'setting', 'help', 'public_keys'
            ]),
            -- External workers: each function checks that the endpoint was granted to them.
            ('ulak', 'ulak_consumer', array[
                'claim', 'heartbeat', 'complete', 'fail', 'release', 'work', 'listen',
                'heartbeat_many', 'complete_many', 'fail_many', 'release_many', 'retry_delay', 'mark_handled', 'setting', 'help'
            ]),
            ('ulak', 'ulak_monitor', array[
                'dlq_summary', 'message_status', 'find_messages', 'find_letters', 'retry_delay', 'setting', 'help',
                'get_endpoint_health', 'get_worker_status', 'health_check', 'health', 'metrics', 'metrics_text', 'doctor',
                'explain', 'history', 'report', 'top', 'public_keys'
            ]),
            ('ulak', 'ulak_worker', array[
                'claim', 'heartbeat', 'complete', 'fail', 'release', 'work', 'listen',
                'heartbeat_many', 'complete_many', 'fail_many', 'release_many', 'retry_delay', 'mark_handled', 'setting', 'help',
                'recover_stale_messages', 'mark_expired_messages', 'update_circuit_breaker', 'run_maintenance', 'run_worker'
            ]),
            -- A procedure that commits runs with the rights of its caller, and so do its parts.
            ('ulak_private', 'ulak_admin', array['await_delivery', 'is_adopted', 'leave_read_only', 'maintenance_step', 'clock', 'check_interval']),
            -- watch() and unwatch() create and drop triggers with the rights of their caller.
            ('ulak_private', 'ulak_admin', array[
                'add_watch', 'remove_watch', 'watch_triggers', 'watched_tables', 'publish_changes', 'row_security_applies'
            ]),
            -- So does apply(), because of them.
            ('ulak_private', 'ulak_admin', array['apply_config', 'apply_watch', 'refuse_document', 'refusal', 'texts']),
            -- Defaults of parameters are worked out with the rights of the caller.
            ('ulak_private', 'ulak_admin', array['caller']),
            -- A view runs its functions with the rights of its reader.
            ('ulak_private', 'ulak_admin', array['retry_schedule', 'shown_config']),
            ('ulak_private', 'ulak_monitor', array['retry_schedule', 'shown_config']),
            ('ulak_private', 'ulak_application', array['await_delivery', 'shown_config']),
            -- The functions that the worker and the maintenance in the database call.
            ('ulak_private', 'ulak_worker', array[
                'is_adopted', 'leave_read_only', 'maintenance_step', 'clock', 'check_interval',
                'load_python', 'python_source', 'python_stamp',
                'claim', 'settle_many', 'release_many', 'heartbeat_many', 'endpoint_configs',
                'check_run', 'enter_worker_session', 'take_worker_slot', 'leave_worker_slot', 'worker_parameters',
                'is_wanted', 'register_worker', 'unregister_worker', 'watch_workers', 'missing_workers', 'login_parameters',
                'await_schedule', 'note_limit', 'suspicion', 'log', 'warn',
                'version', 'stamp_of', 'worker_stamp', 'worker_options', 'worker_check', 'worker_report',
                'worker_protocols', 'protocol_facts', 'listen', 'worker_turn', 'claim_new', 'read_claimed',
                'blocked_endpoints', 'sweep', 'is_poller', 'send_recurring'
            ]),
            -- The same worker, outside of the database: no schedule, no maintenance, no Python in the server.
            ('ulak_private', 'ulak_node', array[
                'python_source', 'python_stamp', 'python_loader', 'version', 'stamp_of', 'worker_stamp',
                'enter_node_session', 'node_parameters', 'worker_parameters', 'take_node_slot', 'leave_node_slot', 'unregister_worker',
                'worker_options', 'note_limit', 'suspicion', 'worker_check', 'worker_report', 'is_poller', 'sweep', 'log',
                'claim', 'worker_turn', 'claim_new', 'read_claimed', 'settle_many', 'release_many', 'heartbeat_many',
                'endpoint_configs', 'blocked_endpoints', 'worker_protocols', 'protocol_facts', 'listen', 'is_adopted'
            ])
    loop
        select n into v_unknown
        from unnest(v_names) n
        where not exists (select from pg_proc p where p.pronamespace = v_schema::regnamespace and p.proname = n);
        if found then
            raise exception '%.% is granted to % but does not exist', v_schema, v_unknown, v_role;
        end if;
        for v_routine in
            select p.oid::regprocedure
            from pg_proc p
            where p.pronamespace = v_schema::regnamespace and p.proname = any (v_names)
        loop
            execute format('grant execute on routine %s to %I', v_routine, v_role);
        end loop;
    end loop;
end
$plpgsql$;

-- Earlier signatures that an upgrade has kept because functions of applications depend on them.
do $plpgsql$
declare
    v_routine text;
begin
    for v_routine in
        select format('%s to %s', p.oid::regprocedure, case when p.proname ~ '^(send|send_many|publish)_of_' then 'ulak_application' else 'ulak_admin' end)
        from pg_proc p
        where p.pronamespace = 'ulak_private'::regnamespace and p.proname ~ '_of_[0-9]'
    loop
        execute 'grant execute on routine ' || v_routine;
    end loop;
end
$plpgsql$;

-- Tables and views. ulak_private.secrets is granted to nobody.
grant select on
    ulak.queue,
    ulak.messages,
    ulak.dlq,
    ulak.archive,
    ulak.endpoints,
    ulak.endpoint_grants,
    ulak.event_type_grants,
    ulak.setting_values,
    ulak.event_types,
    ulak.subscriptions,
    ulak.subscription_list,
    ulak.recurring,
    ulak.recurring_list,
    ulak.watches,
    ulak.watch_list,
    ulak.handled
to ulak_admin;
grant update (config, retry_policy, description) on ulak.endpoints to ulak_admin;

grant select on
    ulak.settings,
    ulak.endpoint_list,
    ulak.event_log,
    ulak.endpoint_stats,
    ulak.endpoint_totals,
    ulak.backlog_samples,
    ulak.traffic,
    ulak.attempts,
    ulak.workers,
    ulak.maintenance_status,
    ulak.top,
    ulak.retry_schedule
to ulak_admin, ulak_monitor;

grant select on ulak.maintenance_status to ulak_worker;

grant select on ulak.settings, ulak.endpoint_list to ulak_application;

-- A worker looks here for new messages.
grant select on ulak.queue_id_seq to ulak_node, ulak_worker;
