-- Many messages at once: purge(), retry_now(), redrive(), discard() and replay_range() choose by the same filters, and show what they
-- chose in a dry run.

-- p_given holds the parameters of the public function by name, in the order in which a dry run prints them.
create or replace function ulak_private.bulk(p_action text, p_given json, p_dry_run boolean, p_now timestamptz)
returns table (messages integer, sample jsonb, command text)
language plpgsql
as $plpgsql$
declare
    v_rate double precision := p_given ->> 'p_rate';
    v_by text := p_given ->> 'p_by';
    v_chosen record;
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_bulk(p_action, p_given);
    v_chosen := ulak_private.choose(p_action, p_given, p_now);
    messages := cardinality(v_chosen.ids);
    sample := v_chosen.sample;
    if p_dry_run then
        command := ulak_private.command(p_action, p_given);
    elsif messages > 0 then
        messages := case p_action
            when 'redrive' then ulak_private.redrive_rows(v_chosen.ids, v_rate, v_by, (p_given ->> 'p_new_generation')::bigint, p_now)
            when 'discard' then ulak_private.discard_rows(v_chosen.ids, v_by, p_now)
            when 'purge' then ulak_private.cancel(ulak_private.lock_pending(v_chosen.ids), v_by, p_now)
            when 'retry_now' then ulak_private.retry_rows(ulak_private.lock_pending(v_chosen.ids), v_rate, p_now)
            when 'replay_range' then ulak_private.replay_rows(p_given, v_chosen.ids, v_chosen.first, v_chosen.last, p_now)
        end;
        -- The other actions write their own log entries.
        if p_action in ('purge', 'retry_now') then
            insert into ulak.event_log (event, endpoint_id, endpoint_name, detail, created_at)
            select
                case p_action when 'purge' then 'messages.purged' else 'messages.retried' end,
                (select e.id from ulak.endpoints e where e.name = p_given ->> 'p_endpoint'),
                p_given ->> 'p_endpoint',
                (
                    select jsonb_object_agg(substr(g.key, 3), g.value)
                    from jsonb_each(jsonb_strip_nulls(p_given::jsonb) - 'p_endpoint' || jsonb_build_object('p_messages', messages)) g
                ),
                ulak_private.log_time(p_now);
        end if;
    end if;
    return next;
end
$plpgsql$;

create or replace function ulak_private.check_bulk(p_action text, p_given json)
returns void
language plpgsql
as $plpgsql$
declare
    v_endpoint text := p_given ->> 'p_endpoint';
begin
    if p_given ->> 'p_limit' is not null then
        perform ulak_private.check_integer('p_limit', (p_given ->> 'p_limit')::integer, 1);
    end if;
    if p_given ->> 'p_priority' is not null then
        perform ulak_private.check_priority((p_given ->> 'p_priority')::integer);
    end if;
    perform ulak_private.check_rate((p_given ->> 'p_rate')::double precision);
    perform ulak_private.check_generation((p_given ->> 'p_new_generation')::bigint);
    -- The others lose nothing, or name an endpoint.
    if p_action = 'discard' and json_strip_nulls(p_given)::jsonb - '{p_limit,p_by}'::text[] = '{}' then
        raise exception 'discard() without a filter would give up all dead letters of all endpoints'
            using errcode = '22023', hint = 'If that is meant: select * from ulak.discard(p_since => ''-infinity'');';
    end if;
    if p_action = 'replay_range' then
        perform ulak_private.check_replay((p_given ->> 'p_from_ts')::timestamptz, (p_given ->> 'p_to_ts')::timestamptz, p_given ->> 'p_status');
    end if;
    -- Only dead letters can be chosen without naming an endpoint.
    if v_endpoint is null and (p_given ->> 'p_ids' is not null or p_action in ('redrive', 'discard')) then
        return;
    end if;
    -- Letters of an endpoint that was dropped can be discarded.
    if p_action <> 'discard' or not exists (select from ulak_private.letters d where d.endpoint_name = v_endpoint) then
        perform ulak_private.endpoint_id(v_endpoint);
    end if;
    if p_given ->> 'p_to' is not null then
        perform ulak_private.endpoint_id(p_given ->> 'p_to');
    end if;
end
$plpgsql$;

-- What each action chooses from: which messages m of which view, and what a sample shows of them. $1 is the time of the call.
create or replace function ulak_private.bulk_facts()
returns table (action text, source text, condition text, shown text)
language sql
immutable
as $sql$
    values
        ('purge', 'queue', $$m.status = 'pending'$$, 'm.id, m.created_at, m.priority, m.attempts, m.last_error'),
        (
            'retry_now',
            'queue',
            -- Not messages scheduled for later, nor those parked behind the head of their ordering key.
            $$m.status = 'pending' and m.attempts > 0 and m.next_retry_at > $1 and m.next_retry_at < 'infinity'
                and coalesce(m.scheduled_at <= $1, true)$$,
            'm.id, m.created_at, m.priority, m.attempts, m.last_error'
        ),
        (
            'redrive',
            'dlq',
            $$m.status = 'failed' and exists (select from ulak.endpoints e where e.id = m.endpoint_id)$$,
            'm.id as dlq_id, m.endpoint_name as endpoint, m.failed_at, m.last_error'
        ),
        ('discard', 'dlq', $$m.status = 'failed'$$, 'm.id as dlq_id, m.endpoint_name as endpoint, m.failed_at, m.last_error'),
        (
            'replay_range',
            'messages',
            -- A redriven letter has a successor, which is in this range itself or still under way.
            $$m.status in ('completed', 'expired', 'failed', 'cancelled') and not exists (
                select
                from ulak_private.letters d
                where m.status = 'failed'
                    and d.original_message_id = m.id
                    and d.status in ('redriven', 'discarded')
                    and d.redriven_message_id is distinct from m.id
            )$$,
            'm.id, m.status, m.created_at, m.last_error'
        )
$sql$;

-- The messages that match all filters, in the order in which they were sent, the range of their times, and a sample of five.
create or replace function ulak_private.choose(
    p_action text,
    p_given json,
    p_now timestamptz,
    out ids bigint[],
    out first timestamptz,
    out last timestamptz,
    out sample jsonb
)
language plpgsql
stable
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_fact record;
    v_place text := 'm.id';
    v_time text := 'm.created_at';
    v_endpoint text := 'm.endpoint_id = (select e.id from ulak.endpoints e where e.name = %L)';
    v_filter jsonpath := ulak_private.condition((p_given ->> 'p_filter')::jsonpath, 'filter');
    v_from text;
begin
    select f.* into strict v_fact
    from ulak_private.bulk_facts() f
    where f.action = p_action;
    if p_given ->> 'p_status' = 'discarded' then
        v_fact.condition := $$exists (select from ulak_private.letters d where d.original_message_id = m.id and d.status = 'discarded')$$;
    end if;
    if v_fact.source = 'dlq' then
        v_place := 'm.original_message_id';
        v_time := 'm.failed_at';
        -- A letter has the name of its endpoint of today or, if it was dropped, the name that it had.
        v_endpoint := '(m.endpoint_id = (select e.id from ulak.endpoints e where e.name = %1$L)'
            ' or m.endpoint_name = %1$L and not exists (select from ulak.endpoints e where e.id = m.endpoint_id))';
    end if;
    select format('from ulak.%I m where %s', v_fact.source, string_agg(format(f.condition, f.value), ' and ' order by f.place)) into v_from
    from (
        values
            (1, '%s', v_fact.condition),
            (2, v_endpoint, p_given ->> 'p_endpoint'),
            (3, 'm.priority = %L', p_given ->> 'p_priority'),
            (4, v_time || ' >= %L', coalesce(p_given ->> 'p_since', p_given ->> 'p_from_ts')),
            (5, v_time || ' < %L', coalesce(p_given ->> 'p_until', p_given ->> 'p_to_ts')),
            (6, 'm.last_error like %L', p_given ->> 'p_error_like'),
            (7, 'm.id = any (%L)', ulak_private.given_text(p_given -> 'p_ids')),
            -- Cancelled messages only if they are asked for.
            (
                8,
                case when p_given ->> 'p_status' is null then 'm.status <> %L' else 'm.status = %L' end,
                case p_given ->> 'p_status' when 'discarded' then 'failed' else coalesce(p_given ->> 'p_status', 'cancelled') end
            ),
            (9, $$jsonb_path_match_tz(m.payload, %L, '{}', true)$$, v_filter::text)
    ) f(place, condition, value)
    where f.value is not null;
    if p_action = 'replay_range' then
        -- A redriven or replayed message keeps its message_id: the last of them stands for all.
        v_from := format('from (select distinct on (m.message_id) m.id, m.created_at %s order by m.message_id, m.id desc) m', v_from);
    end if;
    execute format(
        $sql$
            select coalesce(array_agg(c.id order by c.place), '{}'), min(c.at), max(c.at)
            from (select m.id, %1$s as place, %2$s as at %3$s order by 2 limit $2) c
        $sql$,
        v_place,
        v_time,
        v_from
    )
    into ids, first, last
    using p_now, (p_given ->> 'p_limit')::integer;
    execute format(
        $sql$
            select jsonb_agg(to_jsonb(s) || ulak_private.shown_payload(m.payload) order by %1$s)
            from ulak.%2$I m
            cross join lateral (select %3$s) s
            where m.id = any ($1) and %4$s between $2 and $3
        $sql$,
        v_place,
        v_fact.source,
        v_fact.shown,
        v_time
    )
    into sample
    using ids[1:5], first, last;
end
$plpgsql$;

-- {"payload": ...} if the caller may read payloads, else {}; long payloads are cut.
create or replace function ulak_private.shown_payload(p_payload jsonb)
returns jsonb
language sql
stable
as $sql$
    select case
        when not ulak_private.may_read('ulak.messages') then '{}'
        when length(p_payload::text) > 1000 then jsonb_build_object('payload', left(p_payload::text, 1000) || '...')
        else jsonb_build_object('payload', p_payload)
    end
$sql$;

-- The call that a dry run previews.
create or replace function ulak_private.command(p_function text, p_given json)
returns text
language sql
stable
as $sql$
    select format(
        'select * from ulak.%s(%s);',
        p_function,
        string_agg(format('%s => %L', g.key, ulak_private.given_text(g.value)), ', ' order by g.place)
    )
    from json_each(p_given) with ordinality g(key, value, place)
    -- purge() and retry_now() have no default for p_endpoint.
    where json_typeof(g.value) <> 'null' or g.key = 'p_endpoint' and p_function in ('purge', 'retry_now')
$sql$;

-- A parameter as text; a JSON array as an array literal of PostgreSQL.
create or replace function ulak_private.given_text(p_value json)
returns text
language sql
immutable
as $sql$
    select case json_typeof(p_value) when 'array' then translate(p_value::text, '[]', '{}') else p_value #>> '{}' end
$sql$;
