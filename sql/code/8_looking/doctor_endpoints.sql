-- Endpoints that don't deliver.

create or replace function ulak_private.doctor_endpoints(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        case when h.circuit_broken_since <= p_now - interval '10 minutes' then 'critical' else 'warning' end,
        'circuit',
        format(
            'the circuit of endpoint "%s" opened %s ago%s: %s. %s %s, %s: %s',
            h.name,
            ulak_private.short_duration(p_now - h.circuit_broken_since),
            case when h.circuit_state = 'half_open' then ' and is being probed' else '' end,
            a.cause,
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now),
            case when h.waiting = 1 then 'message waits' else 'messages wait' end,
            coalesce('the last success was ' || ulak_private.short_duration(p_now - h.last_success_at) || ' ago', 'no delivery to it has ever succeeded'),
            coalesce(h.last_error, 'no error is known')
        ),
        format(
            'select * from ulak.ping(%1$L); -- when it answers again: select ulak.reset_circuit_breaker(%1$L);',
            h.name
        )
    from unnest(p_facts) h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where h.circuit_state <> 'closed'
    union all
    -- Endpoints that had only failures in the last five minutes. A failure that retries won't cure, and any failure of an endpoint that
    -- never succeeded, is reported at once; others are from the third on.
    select
        'warning',
        'failing',
        format(
            'endpoint "%s" fails: %s. %sthe last one was %s ago: %s',
            h.name,
            a.cause,
            case when h.failed_attempts > 0 then format('%s in five minutes, %s succeeded; ', ulak_private.counted(h.failed_attempts, 'attempt'), case when h.last_success_at is null then 'none ever' else 'none' end) else '' end,
            ulak_private.short_duration(p_now - h.last_failure_at),
            h.last_error
        ),
        a.fix
    from (
        select h.*
        from unnest(p_facts) h
        where h.enabled
            and h.protocol = any (ulak_private.worker_protocols())
            and h.circuit_state = 'closed'
            and (h.last_success_at is null or h.last_failure_at > least(h.last_success_at, p_now))
            and h.last_failure_at > p_now - interval '1 day'
            and coalesce(h.last_failed_percent, 100) = 100
    ) h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)
        and not (a.cause ~ 'address is blocked$' and ulak_private.is_unblocked(h.last_error))
$sql$;

-- Endpoints that are disabled, or will be because their receiver stays broken.
create or replace function ulak_private.doctor_disabled(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        'info',
        'disabled',
        format(
            'endpoint "%s" is disabled and holds %s %s',
            h.name,
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now),
            case when h.waiting = 1 then 'message' else 'messages' end
        ),
        format('select ulak.enable_endpoint(%L); -- p_rate => 100 releases them at 100 a second', h.name)
    from unnest(p_facts) h
    where not h.enabled and h.waiting > 0
    union all
    select
        'warning',
        'disable_after',
        format(
            'endpoint "%s" has had no success for %s (%s) and will be disabled in %s: %s',
            f.endpoint_name,
            ulak_private.short_duration(p_now - f.since),
            ulak_private.counted(f.failures, 'failure'),
            ulak_private.short_duration(greatest(f.disable_at - p_now, '0')),
            coalesce(f.last_error, 'no error is known')
        ),
        format('select * from ulak.ping(%L);', f.endpoint_name)
    from ulak_private.failing_endpoints(p_now) f
    where f.failures >= 20
    union all
    select
        'warning',
        'disable_after',
        format('endpoint "%s" was disabled because its receiver stayed broken: %s', e.name, coalesce(e.last_error, 'no error is known')),
        format('select * from ulak.ping(%1$L); -- when it answers again: select ulak.enable_endpoint(%1$L);', e.name)
    from ulak.endpoints e
    where not e.enabled and e.failing_told = 100
$sql$;
