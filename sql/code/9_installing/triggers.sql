-- The triggers of ulak's own tables; their functions stand where the rule is.

-- Only those that are missing: `create or replace trigger` locks its table against writers, and an upgrade under load would meet a worker or a
-- sender in a circle of locks. An upgrade that changes one drops it first, while it holds its other locks.
do $plpgsql$
declare
    v_table regclass;
    v_name text;
    v_event text;
    v_call text;
begin
    for v_table, v_name, v_event, v_call in
        values
            -- The columns of the breaker and the rate limit are left out: they change all the time.
            (
                'ulak.endpoints'::regclass,
                'endpoints_are_valid',
                'before insert or update of name, protocol, config, retry_policy, description, config_version',
                'for each row execute function ulak_private.check_endpoint()'
            ),
            (
                'ulak.endpoints',
                'endpoints_are_logged',
                'after insert or update of name, protocol, config, retry_policy, description, config_version',
                'for each row execute function ulak_private.log_endpoint()'
            ),
            (
                'ulak.subscriptions',
                'bodies_are_valid',
                'after insert or update or delete',
                'for each row execute function ulak_private.renew_bodies()'
            ),
            (
                'ulak_private.events',
                'events_are_immutable',
                'before update',
                'for each statement execute function ulak_private.refuse_change_of_sent()'
            ),
            -- For each statement: a trigger for each row would have every claim and every settlement lock its rows once more, though
            -- they name other columns.
            (
                'ulak_private.deliveries',
                'deliveries_message_id_is_immutable',
                'before update of message_id',
                'for each statement execute function ulak_private.refuse_change_of_sent()'
            )
    loop
        if not exists (select from pg_catalog.pg_trigger t where t.tgrelid = v_table and t.tgname = v_name) then
            execute format('create trigger %I %s on %s %s', v_name, v_event, v_table, v_call);
        end if;
    end loop;
end
$plpgsql$;
