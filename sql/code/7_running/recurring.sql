-- Recurring messages: each is a job of pg_cron, and each run sends one message.

create or replace function ulak.schedule(
    p_name text,
    p_cron text,
    p_endpoint text,
    p_payload jsonb,
    p_priority integer default 0,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_expires_after interval default null
)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.endpoint_id(p_endpoint);
    v_job text := ulak_private.job_name('recurring ' || p_name);
begin
    perform ulak_private.check_recurring(p_name, p_cron, p_expires_after);
    perform ulak_private.check_messages(
        array[(v_endpoint_id, p_payload, p_priority, null, null, null, null, p_ordering_key, p_headers, p_metadata)::ulak_private.message]
    );
    perform ulak_private.require_pg_cron();
    perform ulak_private.lock('schedule');
    insert into ulak.recurring (name, cron, endpoint_id, payload, priority, ordering_key, headers, metadata, expires_after)
    values (p_name, p_cron, v_endpoint_id, p_payload, p_priority, p_ordering_key, p_headers, p_metadata, p_expires_after)
    on conflict (name) do update
    set cron = excluded.cron,
        endpoint_id = excluded.endpoint_id,
        payload = excluded.payload,
        priority = excluded.priority,
        ordering_key = excluded.ordering_key,
        headers = excluded.headers,
        metadata = excluded.metadata,
        expires_after = excluded.expires_after;
    return query
    select r.item, r.status, r.detail, r.fix
    from ulak_private.run_in_pg_cron(
        v_job,
        (
            select ulak_private.schedule_command(j.jobname, j.schedule, j.command, j.username, j.database)
            from ulak_private.wanted_jobs(0) j
            where j.jobname = v_job
        ),
        'scheduled'
    ) r;
end
$plpgsql$;

comment on function ulak.schedule(text, text, text, jsonb, integer, text, jsonb, jsonb, interval) is
    'lets pg_cron send a message at the times of a cron expression; scheduling the same name again replaces it';

create or replace function ulak.unschedule(p_name text)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_job text := ulak_private.job_name('recurring ' || p_name);
begin
    perform ulak_private.lock('schedule');
    delete from ulak.recurring r where r.name = p_name;
    if not found then
        raise exception 'nothing is scheduled by the name %', coalesce('"' || left(p_name, 100) || '"', 'null')
            using errcode = '42704', hint = ulak_private.did_you_mean(p_name, array(select r.name from ulak.recurring r));
    end if;
    return query
    select r.item, r.status, r.detail, r.fix
    from ulak_private.run_in_pg_cron(
        v_job,
        format('select cron.unschedule(jobid) from cron.job where jobname = %L;', v_job),
        'unscheduled'
    ) r;
end
$plpgsql$;

comment on function ulak.unschedule(text) is 'ends a recurring message; messages already sent stay';

create or replace view ulak.recurring_list as
select
    r.name,
    r.cron,
    e.name as endpoint,
    r.payload,
    r.priority,
    r.ordering_key,
    r.headers,
    r.metadata,
    r.expires_after,
    r.last_sent_at,
    r.created_at
from ulak.recurring r
join ulak.endpoints e on e.id = r.endpoint_id;

comment on view ulak.recurring_list is 'recurring messages with the names of their endpoints';
call ulak_private.describe('ulak.recurring_list', 'ulak.recurring');
comment on column ulak.recurring_list.name is 'what unschedule() takes';
comment on column ulak.recurring_list.endpoint is 'name of the endpoint that it goes to';

-- What a job calls. If pg_cron starts a job twice in a minute, or two clusters run it after a restore, one message is sent for that minute.
-- Null: the message isn't scheduled any more.
create or replace function ulak_private.send_recurring(p_name text, p_now timestamptz default clock_timestamp())
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_recurring record;
    v_minute timestamp;
begin
    p_now := ulak_private.clock(p_now);
    v_minute := date_trunc('minute', p_now at time zone 'UTC');
    if not ulak_private.is_adopted() then
        return null;
    end if;
    update ulak.recurring r
    set last_sent_at = p_now
    where r.name = p_name
    returning r.* into v_recurring;
    if not found then
        return null;
    end if;
    -- Not by send(): the job's role needs no right to send to this endpoint, and no application can use this idempotency key.
    return (ulak_private.enqueue(array[(
        v_recurring.endpoint_id,
        v_recurring.payload,
        v_recurring.priority,
        null,
        format('ulak.schedule %s %s', p_name, to_char(v_minute, 'YYYY-MM-DD"T"HH24:MI"Z"')),
        null,
        p_now + v_recurring.expires_after,
        v_recurring.ordering_key,
        v_recurring.headers,
        v_recurring.metadata
    )::ulak_private.message]))[1];
end
$plpgsql$;

-- Runs the command, or returns how to run it in pg_cron's database.
create or replace function ulak_private.run_in_pg_cron(p_item text, p_command text, p_done text)
returns table (item text, status text, detail text, fix text)
language plpgsql
as $plpgsql$
begin
    if ulak_private.has_pg_cron() then
        execute p_command;
        return query values (p_item, 'done', p_done, null::text);
    else
        return query values (
            p_item,
            'to do',
            ulak_private.elsewhere(),
            ulak_private.fix_elsewhere(format('$ulak$%s$ulak$', p_command))
        );
    end if;
end
$plpgsql$;

create or replace function ulak_private.require_pg_cron()
returns void
language plpgsql
as $plpgsql$
declare
    v_problem record;
begin
    select c.detail, c.fix into v_problem
    from ulak_private.check_pg_cron(ulak_private.default_workers()) c
    where c.item = 'pg_cron' and c.status = 'problem'
    limit 1;
    if found then
        raise exception 'recurring messages need pg_cron'
            using errcode = '55000', detail = v_problem.detail, hint = v_problem.fix;
    end if;
end
$plpgsql$;

create or replace function ulak_private.check_recurring(p_name text, p_cron text, p_expires_after interval)
returns void
language plpgsql
as $plpgsql$
begin
    if p_name is null or p_name !~ '^[A-Za-z0-9._-]{1,100}$' then
        raise exception 'invalid name of a recurring message'
            using errcode = '22023', detail = 'A name has 1 to 100 letters, digits, dots, hyphens and underscores.';
    elsif p_cron is null or p_cron !~ E'^ *(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|([0-9A-Za-z*,/$-]+ +){4}[0-9A-Za-z*,/$-]+) *$' then
        raise exception 'invalid cron expression %', coalesce(quote_literal(left(p_cron, 100)), 'null')
            using errcode = '22023',
                detail = 'An expression has five fields: minute, hour, day of the month, month, day of the week. pg_cron uses GMT unless cron.timezone says otherwise.',
                hint = 'Such as ''*/5 * * * *'', ''0 6 * * 1-5'' or ''@daily''; more often than once a minute isn''t possible.';
    elsif p_expires_after <= interval '0' or p_expires_after > interval '1 year' then
        raise exception 'expires_after must be longer than 0 and at most a year'
            using errcode = '22023', detail = format('It is %s.', p_expires_after);
    end if;
end
$plpgsql$;
