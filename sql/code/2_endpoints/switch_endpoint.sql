-- Enabling and disabling endpoints.

create or replace function ulak.disable_endpoint(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.switch_endpoint(
        ulak_private.lock_endpoint(p_name), false, null, 'disabled by ' || ulak_private.caller(), ulak_private.clock(p_now)
    )
$sql$;

comment on function ulak.disable_endpoint(text, timestamptz) is
    'stops deliveries to an endpoint; its messages are still accepted, and held; false if it was disabled already';

create or replace function ulak.enable_endpoint(
    p_name text,
    p_rate double precision default null,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.switch_endpoint(
        ulak_private.lock_endpoint(p_name), true, p_rate, 'enabled by ' || ulak_private.caller(), ulak_private.clock(p_now)
    )
    from ulak_private.check_rate(p_rate)
$sql$;

comment on function ulak.enable_endpoint(text, double precision, timestamptz) is
    'resumes deliveries to an endpoint; held messages leave at p_rate a second if given; false if it was enabled already';

create or replace function ulak_private.switch_endpoint(
    p_endpoint ulak.endpoints,
    p_enabled boolean,
    p_rate double precision,
    p_reason text,
    p_now timestamptz
)
returns boolean
language plpgsql
as $plpgsql$
begin
    update ulak.endpoints e
    set enabled = p_enabled,
        release_rate = p_rate,
        release_before = case when p_rate is not null then p_now end,
        rate_tokens = case when p_rate is null then e.rate_tokens else 0 end,
        rate_refilled_at = case when p_rate is null then e.rate_refilled_at else p_now end,
        failing_since = null,
        failing_told = null,
        updated_at = p_now
    where e.id = p_endpoint.id and (e.enabled <> p_enabled or e.release_rate is distinct from p_rate);
    if p_endpoint.enabled = p_enabled then
        return false;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, detail, created_at)
    values (
        case when p_enabled then 'endpoint.enabled' else 'endpoint.disabled' end,
        p_endpoint.id,
        p_endpoint.name,
        jsonb_build_object('enabled', p_endpoint.enabled),
        jsonb_build_object('enabled', p_enabled),
        jsonb_strip_nulls(jsonb_build_object('reason', p_reason, 'rate', p_rate)),
        ulak_private.log_time(p_now)
    );
    if not p_enabled then
        perform ulak_private.tell_of_endpoint(
            'ulak.endpoint.disabled', p_endpoint.id, jsonb_build_object('endpoint', p_endpoint.name, 'reason', p_reason), p_now
        );
    end if;
    return true;
end
$plpgsql$;

-- A receiver that answers 410 Gone wants no more messages: disables the endpoints of such dead messages, if their configs say so. Settling
-- calls this near its end, because it locks endpoints.
create or replace function ulak_private.disable_gone(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_endpoint_id bigint;
    v_endpoint ulak.endpoints;
begin
    for v_endpoint_id in
        select distinct q.endpoint_id
        from ulak_private.deliveries q
        where q.id = any (p_ids) and starts_with(q.last_error, '[DISABLE]')
        order by q.endpoint_id
    loop
        v_endpoint := ulak_private.lock_endpoint(v_endpoint_id);
        if v_endpoint.enabled and (v_endpoint.config -> 'auto_disable_on_gone')::boolean then
            perform ulak_private.switch_endpoint(v_endpoint, false, null, 'the receiver answered 410 Gone', p_now);
        end if;
    end loop;
end
$plpgsql$;
