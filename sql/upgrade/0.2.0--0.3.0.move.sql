-- The last step before the code: what is private moves from schema ulak to ulak_private, and loses its underscore. The steps before this
-- one speak of everything by its old name. Only the catalog changes; every table and sequence that moves is locked since the beginning, or
-- new.
do $plpgsql$
declare
    v_name text;
    v_kind text;
    v_signature text;
begin
    for v_name in
        select t.typname
        from pg_type t
        join pg_class c on c.oid = t.typrelid and c.relkind = 'c'
        where t.typnamespace = 'ulak'::regnamespace
    loop
        execute format('alter type ulak.%I set schema ulak_private', v_name);
        execute format('alter type ulak_private.%I rename to %I', v_name, substr(v_name, 2));
    end loop;

    -- Indexes and the sequences of identity columns follow their tables.
    for v_name, v_kind in
        select c.relname, case c.relkind when 'v' then 'view' else 'table' end
        from pg_class c
        where c.relnamespace = 'ulak'::regnamespace
            and c.relkind in ('r', 'p', 'v')
            and (
                c.relname like E'\\_%'
                or c.relispartition
                or c.relname in (
                    'cluster_home', 'cluster_identity', 'endpoint_headroom', 'locks', 'maintenance_runs', 'ordering_keys', 'schedule',
                    'secrets', 'sweep_state'
                )
            )
    loop
        execute format('alter %s ulak.%I set schema ulak_private', v_kind, v_name);
    end loop;
    for v_name, v_kind in
        select c.relname, case c.relkind when 'v' then 'view' when 'i' then 'index' else 'table' end
        from pg_class c
        where c.relnamespace = 'ulak_private'::regnamespace and c.relkind in ('r', 'p', 'v', 'i') and c.relname like E'\\_%'
    loop
        execute format('alter %s ulak_private.%I rename to %I', v_kind, v_name, substr(v_name, 2));
    end loop;

    for v_name, v_signature in
        select p.proname, format('%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
        from pg_proc p
        where p.pronamespace = 'ulak'::regnamespace
            and p.proname like E'\\_%'
            -- 0.3.0 has none of these: they stay for sessions that are in the middle of a function of 0.2.0.
            and p.proname <> all (array[
                '_attempts', '_check_adopted', '_fine_histogram', '_raise_not_waiting', '_rate_per_second', '_settings_fingerprint', '_tell_disabled',
                '_amqp_config_violation', '_are_events', '_are_message_options', '_are_messages', '_auth_schema', '_auth_violation',
                '_await_send', '_broker_tls_config_schema', '_check_secret_name',
                '_circuit_breaker_violation', '_cloudevents_config_schema', '_cloudevents_violation', '_count_unresolved',
                '_delivery_config_schema', '_events', '_headers_violation', '_host_violation', '_how_to_free', '_http_config_violation',
                '_http_keys_violation', '_kafka_broker_violation', '_kafka_config_violation', '_kafka_headers_violation',
                '_kafka_options_violation', '_kafka_security_violation', '_kafka_topic_violation', '_mqtt_config_violation',
                '_names_secret', '_new_signing_secret', '_proxy_violation', '_put_secrets', '_redis_config_violation',
                '_request_options_schema', '_require_valid', '_required_beside', '_retry_policy_violation', '_route_violation', '_signature_violation',
                '_signing_secret_violation', '_tls_violation', '_url_violation', '_with_properties'
            ])
    loop
        execute format('alter routine ulak.%s set schema ulak_private', v_signature);
        execute format('alter routine ulak_private.%s rename to %I', v_signature, substr(v_name, 2));
    end loop;
end
$plpgsql$;

-- Sessions that are in the middle of a function of 0.2.0, or run its Python, go on with the old names of functions and types.
do $plpgsql$
declare
    v_name text;
    v_statement text;
begin
    for v_name in
        select t.typname
        from pg_type t
        join pg_class c on c.oid = t.typrelid and c.relkind = 'c'
        where t.typnamespace = 'ulak_private'::regnamespace
    loop
        execute format('create domain ulak.%I as ulak_private.%I', '_' || v_name, v_name);
    end loop;
    for v_statement in
        select format(
            case p.prokind
                when 'p' then 'create procedure ulak.%I(%s) language plpgsql as %4$L'
                else 'create function ulak.%I(%s) returns %s language sql as %L'
            end,
            '_' || p.proname,
            pg_get_function_arguments(p.oid),
            pg_get_function_result(p.oid),
            format(
                case p.prokind when 'p' then 'begin call ulak_private.%I(%s); end' else 'select * from ulak_private.%I(%s)' end,
                p.proname,
                (select string_agg('$' || n, ', ' order by n) from generate_series(1, p.pronargs) n)
            )
        )
        from pg_proc p
        where p.pronamespace = 'ulak_private'::regnamespace
            and p.prokind in ('f', 'p')
            and p.prorettype not in ('trigger'::regtype, 'event_trigger'::regtype)
            -- Earlier signatures of public functions, which functions of applications depend on.
            and p.proname !~ '_of_[0-9]'
    loop
        execute v_statement;
    end loop;
end
$plpgsql$;
