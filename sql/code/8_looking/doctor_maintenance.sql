-- Steps of maintenance that failed or didn't run.

create or replace function ulak_private.doctor_maintenance(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        case when m.failed then 'critical' else 'warning' end,
        'maintenance',
        m.trouble,
        'call ulak.run_maintenance();'
    from (
        select
            case
                -- pg_cron begins at the next full minute.
                when count(*) = 0 then (
                    select 'run_maintenance() never ran'
                    where exists (select from ulak.endpoints)
                        and not exists (select from ulak_private.schedule c where c.changed_at > p_now - interval '2 minutes' and not c.is_stopped)
                )
                when bool_and(s.is_late) then 'run_maintenance() last ran ' || ulak_private.short_duration(p_now - max(s.started_at)) || ' ago'
                else string_agg(
                    case
                        when s.is_failed then format('%s failed: %s', s.step, s.last_error)
                        else format('%s last ran %s ago', s.step, ulak_private.short_duration(p_now - s.started_at))
                    end,
                    '; '
                    order by s.step
                ) filter (where s.is_failed or s.is_late)
            end as trouble,
            bool_or(s.is_failed and not s.is_late) as failed
        from (
            select
                r.step,
                r.started_at,
                r.last_error,
                coalesce(r.last_error_at >= r.started_at, false) as is_failed,
                r.started_at < p_now - interval '5 minutes' as is_late
            from ulak_private.maintenance_runs r
        ) s
    ) m
    where m.trouble is not null
$sql$;
