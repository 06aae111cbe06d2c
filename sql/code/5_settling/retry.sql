-- Retry delays: how long a failed message waits.

create or replace function ulak.retry_delay(p_policy jsonb, p_retry_count integer)
returns interval
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.check_retry_policy(p_policy);
    return ulak_private.backoff(ulak_private.retry_defaults() || coalesce(p_policy, '{}'), p_retry_count);
end
$plpgsql$;

comment on function ulak.retry_delay(jsonb, integer) is
    'how long a message waits after its failure number n (from 0) under this retry policy; missing keys come from the '
    'settings';

-- A complete policy from the settings; an endpoint's own keys override it.
create or replace function ulak_private.retry_defaults()
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object(
        'max_retries', ulak.setting('default_max_retries')::integer,
        'backoff', ulak.setting('default_backoff'),
        'base_delay_seconds', ulak.setting('retry_base_delay')::integer,
        'max_delay_seconds', ulak.setting('retry_max_delay')::integer,
        'increment_seconds', ulak.setting('retry_increment')::integer,
        'jitter', ulak.setting('default_jitter')
    )
$sql$;

-- Takes a complete policy. Exponents stop at 10: 2^10 base delays exceed any cap, and 2^1000 would overflow.
create or replace function ulak_private.backoff(p_policy jsonb, p_retry_count integer)
returns interval
language plpgsql
volatile
as $plpgsql$
declare
    v_base double precision := p_policy -> 'base_delay_seconds';
    v_cap double precision := p_policy -> 'max_delay_seconds';
    v_step integer := greatest(p_retry_count, 0);
    v_seconds double precision;
begin
    case p_policy ->> 'backoff'
        when 'fixed' then
            v_seconds := v_base;
        when 'linear' then
            v_seconds := least(v_base + v_step * (p_policy -> 'increment_seconds')::double precision, v_cap);
        when 'quadratic' then
            v_seconds := least(v_base * power(v_step + 1.0, 2), v_cap);
        when 'schedule' then
            v_seconds := p_policy #> array['schedule', least(v_step, jsonb_array_length(p_policy -> 'schedule') - 1)::text];
        when 'exponential' then
            v_seconds := case when v_step > 10 then v_cap else least(v_base * power(2.0, v_step), v_cap) end;
        else
            raise exception 'unknown backoff %', coalesce('"' || (p_policy ->> 'backoff') || '"', 'null')
                using errcode = '22023',
                    hint = 'Backoffs are fixed, linear, quadratic, schedule and exponential.';
    end case;
    return make_interval(
        secs => case p_policy ->> 'jitter'
            when 'full' then v_seconds * random()
            when 'equal' then v_seconds * (0.5 + random() / 2)
            else v_seconds
        end
    );
end
$plpgsql$;
