-- Dead letters: too many new ones, some that wait for a decision, some that are deleted soon, and whether anybody is told of them.

create or replace function ulak_private.doctor_dlq(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    -- Letters need a decision also where the dead-letter queue doesn't grow.
    with growth as materialized (
        select g.*
        from ulak_private.dlq_growth(p_now) g
    )
    select
        'warning',
        'dlq',
        format(
            'the dead-letter queue grows: %s%s entered in the last hour, %s in the hour before; most often: %s',
            n.letters, case when n.letters > 5000 then ' or more' else '' end, n.before, n.error
        ),
        format(
            'select * from ulak.redrive(p_endpoint => %L, p_since => %L, p_dry_run => true);', n.endpoint, p_now - interval '1 hour'
        )
    from growth n
    union all
    select
        'warning',
        'dlq',
        format(
            case
                when d.letters = 1 then '%s dead letter of endpoint "%s" waits for a decision'
                when d.endpoints = 1 then '%s dead letters of endpoint "%s" wait for a decision'
                else '%s dead letters wait for a decision, most of them of endpoint "%s"'
            end,
            ulak_private.known_count(d.letters, d.is_estimate, d.sampled_at, p_now),
            d.endpoint
        ),
        format('select * from ulak.redrive(p_endpoint => %L, p_dry_run => true);', d.endpoint)
    from (
        select
            sum(f.dead) as letters,
            count(*) as endpoints,
            bool_or(f.dead_is_estimate) as is_estimate,
            min(f.dead_sampled_at) as sampled_at,
            (array_agg(f.name order by f.dead desc, f.name))[1] as endpoint
        from unnest(p_facts) f
        where f.dead > 0
    ) d
    where d.letters > 0 and not exists (select from growth)
    union all
    select
        'warning',
        'dlq',
        format(
            'dead letters that nobody has redriven will be deleted in %s; the oldest is of endpoint "%s"',
            ulak_private.short_duration(d.archived_at + r.kept - p_now), d.endpoint_name
        ),
        'select * from ulak.dlq_summary(); -- then: select * from ulak.redrive(p_endpoint => ..., p_dry_run => true);'
    from (select make_interval(hours => 24 * ulak.setting('dlq_retention_days')::integer) as kept) r
    cross join lateral (
        select d.archived_at, d.endpoint_name, d.status
        from (
            select d.archived_at, d.endpoint_name, d.status
            from ulak.dlq d
            where d.archived_at < p_now - r.kept * 0.9
            order by d.archived_at
            limit 5000
        ) d
        where d.status = 'failed'
        order by d.archived_at
        limit 1
    ) d
$sql$;

-- Growing: more letters came in the last hour than in the one before. At most 5,001 of each are counted.
create or replace function ulak_private.dlq_growth(p_now timestamptz)
returns table (letters bigint, before bigint, endpoint text, error text)
language sql
stable
as $sql$
    select n.letters, b.letters, n.endpoint, n.error
    from (
        select
            count(*) as letters,
            mode() within group (order by d.endpoint_name) as endpoint,
            mode() within group (order by d.last_error) as error
        from (
            select d.endpoint_name, d.last_error, d.status
            from ulak.dlq d
            where d.archived_at > p_now - interval '1 hour' and d.archived_at <= p_now
            limit 5001
        ) d
        where d.status = 'failed'
    ) n
    cross join (
        select count(*) as letters
        from (
            select
            from ulak.dlq d
            where d.archived_at > p_now - interval '2 hours' and d.archived_at <= p_now - interval '1 hour'
            limit 5001
        ) d
    ) b
    where n.letters >= 10 and n.letters > b.letters
$sql$;

-- start() says it once; doctor() not before there is a dead letter, since an installation without alerts is no problem as long as nothing
-- dies. Prometheus may be watching, which can't be seen from here.
create or replace function ulak_private.missing_alerts()
returns table (finding text, fix text)
language sql
stable
as $sql$
    select
        'nobody is told of dead letters: no endpoint subscribes to ulak.endpoint.dead_letters or ulak.message.dead, and log_dlq is off',
        'select ulak.configure(''log_dlq'', ''true''); -- or subscribe an endpoint to ulak.endpoint.dead_letters'
    where not (
        ulak_private.has_subscribers('ulak.endpoint.dead_letters')
        or ulak_private.has_subscribers('ulak.message.dead')
        or ulak_private.stored_setting('log_dlq')::boolean
    )
$sql$;

create or replace function ulak_private.doctor_alerts(p_facts ulak_private.endpoint_fact[])
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select 'warning', 'alerts', a.finding, a.fix
    from ulak_private.missing_alerts() a
    where exists (select from unnest(p_facts) f where f.dead > 0)
$sql$;
