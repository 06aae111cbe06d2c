-- Operator events: ulak delivers news about endpoints and messages to the endpoints that subscribe to them.

-- These event types are code, not data: dumps leave them out, and upgrades add new ones.
insert into ulak.event_types as t (name, description, created_at)
values
    ('ulak.endpoint.opened', 'the circuit of an endpoint opened: deliveries to it pause', '-infinity'),
    ('ulak.endpoint.closed', 'the circuit of an endpoint closed again', '-infinity'),
    ('ulak.endpoint.disabled', 'an endpoint was disabled, by an administrator or because it answered 410 Gone', '-infinity'),
    ('ulak.endpoint.failing', 'an endpoint has had no success for half, or nine tenths, of its disable_after', '-infinity'),
    ('ulak.endpoint.dead_letters', 'a digest: how many messages of an endpoint became dead letters in the last minute, by event type and error', '-infinity'),
    ('ulak.message.dead', 'a message became a dead letter', '-infinity'),
    ('ulak.message.delivered', 'a message was delivered, to an endpoint whose config announces it', '-infinity'),
    ('ulak.message.expired', 'a message was not delivered in time, to an endpoint whose config announces it', '-infinity'),
    ('ulak.message.cancelled', 'a message was taken back, from an endpoint whose config announces it', '-infinity')
on conflict (name) do update set description = excluded.description;

create or replace function ulak_private.has_subscribers(p_event_type text)
returns boolean
language sql
stable
as $sql$
    select exists (select from ulak_private.subscriptions_to(p_event_type))
$sql$;

-- Sends events about endpoints: element i of the arrays is one event. The endpoint that an event is about doesn't get it. This never waits
-- nor fails, since it runs inside a settle: if the queue is full, the events are left out, unless they are owed, and the event log says so;
-- their places in the arrays are returned. Its metadata marks an operator event, so that no further events are sent about it.
create or replace function ulak_private.tell_operators(
    p_event_type text,
    p_endpoint_ids bigint[],
    p_payloads jsonb[],
    p_are_owed boolean,
    p_now timestamptz
)
returns integer[]
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    -- The event at v_places[i] goes to v_receivers[i] as message v_ids[i].
    v_ids bigint[];
    v_receivers bigint[];
    v_places integer[];
begin
    -- Drawn in the order of the subquery, so the last id is the greatest.
    select array_agg(nextval('ulak.queue_id_seq')), array_agg(m.receiver), array_agg(m.place) into v_ids, v_receivers, v_places
    from (
        -- An endpoint gets an event once, however many of its subscriptions match.
        select distinct v.place, s.endpoint_id as receiver
        from ulak_private.subscriptions_to(p_event_type) s
        cross join unnest(p_endpoint_ids, p_payloads) with ordinality v(endpoint_id, payload, place)
        where s.endpoint_id <> v.endpoint_id and ulak_private.is_wanted_payload(v.payload, s.filter, s.predicate)
        order by v.place, s.endpoint_id
    ) m;
    if v_ids is null then
        return null;
    end if;
    if not p_are_owed and not ulak_private.has_room(v_ids[cardinality(v_ids)]) then
        if ulak_private.skip_if_full(p_event_type, v_ids, p_now) then
            return v_places;
        end if;
    end if;
    insert into ulak_private.deliveries (id, event_id, endpoint_id, correlation_id, next_retry_at, created_at, updated_at)
    select m.id, m.event_id, e.id, (p_payloads[m.place] ->> 'correlation_id')::uuid, p_now, p_now, p_now
    from (
        select m.id, m.endpoint_id, m.place, min(m.id) over (partition by m.place) as event_id
        from unnest(v_ids, v_receivers, v_places) m(id, endpoint_id, place)
    ) m
    join ulak.endpoints e on e.id = m.endpoint_id;
    insert into ulak_private.events (id, created_at, payload, headers, metadata)
    select
        min(m.id),
        p_now,
        p_payloads[m.place],
        -- Receivers can trust this header: applications can't send it, though they can send any payload.
        jsonb_build_object('ulak-event-type', p_event_type, 'ulak-event-id', gen_random_uuid()),
        jsonb_build_object('event_type', p_event_type)
    from unnest(v_ids, v_places) m(id, place)
    group by m.place;
    if ulak_private.wants_wake_up(v_ids[1]) then
        perform ulak_private.wake_workers();
    end if;
    return null;
end
$plpgsql$;

-- True if the queue is full, which goes to the event log. Its exception block is a subtransaction, so it is called only if there may be no
-- room.
create or replace function ulak_private.skip_if_full(p_event_type text, p_ids bigint[], p_now timestamptz)
returns boolean
language plpgsql
as $plpgsql$
declare
    v_count integer := cardinality(p_ids);
begin
    perform ulak_private.check_backpressure(p_ids[v_count], v_count);
    return false;
exception
    when configuration_limit_exceeded then
        insert into ulak.event_log (event, detail, created_at)
        values (
            'operator_event.skipped',
            jsonb_build_object('event_type', p_event_type, 'messages', v_count, 'reason', sqlerrm),
            ulak_private.log_time(p_now)
        );
        return true;
end
$plpgsql$;

create or replace function ulak_private.tell_of_endpoint(p_event_type text, p_endpoint_id bigint, p_facts jsonb, p_now timestamptz)
returns void
language sql
as $sql$
    select ulak_private.tell_operators(
        p_event_type,
        array[p_endpoint_id],
        array[jsonb_build_object('type', p_event_type, 'at', p_now) || jsonb_strip_nulls(p_facts)],
        false,
        p_now
    )
    where ulak_private.has_subscribers(p_event_type)
$sql$;

-- Called at every transition of a circuit. Operators hear that it opened and that it closed again, but nothing about the probes in between.
create or replace function ulak_private.tell_circuit(p_endpoint ulak.endpoints, p_new_state text, p_now timestamptz)
returns void
language sql
as $sql$
    select ulak_private.tell_of_endpoint(
        case p_new_state when 'open' then 'ulak.endpoint.opened' else 'ulak.endpoint.closed' end,
        p_endpoint.id,
        jsonb_build_object(
            'endpoint', p_endpoint.name,
            'failures', p_endpoint.circuit_failure_count,
            'error', case when p_new_state = 'open' then p_endpoint.last_error end
        ),
        p_now
    )
    where p_new_state = 'open' and p_endpoint.circuit_state = 'closed'
        or p_new_state = 'closed' and p_endpoint.circuit_state <> 'closed'
$sql$;

-- For bury(): an event about each letter, and counts for the next digests. One sender could fill the queue with such events, so they are
-- left out if it is full, and the digest says how many. If the endpoint announces dead letters, the event says more and is never left out.
create or replace function ulak_private.tell_of_dead_letters(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_told record;
    v_skipped bigint[] := '{}';
begin
    if ulak_private.has_subscribers('ulak.message.dead') then
        for v_told in
            select
                a.is_announced,
                array_agg(f.id order by f.id) as ids,
                array_agg(f.endpoint_id order by f.id) as endpoint_ids,
                array_agg(
                    case
                        when a.is_announced then ulak_private.announcement(f.facts, 'dead', d.metadata, d.response, p_now)
                        else jsonb_build_object('type', 'ulak.message.dead', 'at', p_now) || f.facts
                    end
                    order by f.id
                ) as payloads
            from ulak_private.dead_facts(p_ids) f
            join ulak.dlq d on d.id = (f.facts -> 'dlq_id')::bigint
            left join ulak.endpoints e on e.id = f.endpoint_id
            cross join lateral (select coalesce(e.config -> 'announce' ? 'dead', false)) a(is_announced)
            where not ulak_private.is_own_event(f.facts)
            group by a.is_announced
        loop
            v_skipped := v_skipped || array(
                select v_told.ids[s.place]
                from unnest(ulak_private.tell_operators(
                    'ulak.message.dead', v_told.endpoint_ids, v_told.payloads, v_told.is_announced, p_now
                )) s(place)
            );
        end loop;
    end if;
    if ulak_private.has_subscribers('ulak.endpoint.dead_letters') or ulak_private.stored_setting('log_dlq')::boolean then
        insert into ulak_private.dead_counts (endpoint_id, endpoint_name, event_type, cause, letters, skipped, counted_at)
        select
            f.endpoint_id,
            f.facts ->> 'endpoint',
            f.facts ->> 'event_type',
            ulak_private.cause(f.facts ->> 'error'),
            count(*),
            count(*) filter (where f.id = any (v_skipped)),
            p_now
        from ulak_private.dead_facts(p_ids) f
        group by 1, 2, 3, 4;
    end if;
end
$plpgsql$;

-- Whether a message is an event of ulak itself, by its metadata or by the facts of its dead letter.
create or replace function ulak_private.is_own_event(p_facts jsonb)
returns boolean
language sql
immutable
as $sql$
    select coalesce(starts_with(p_facts ->> 'event_type', 'ulak.'), false)
$sql$;

-- For maintenance: one event for each endpoint that had dead letters since the last time, which names the 20 most frequent causes, and, if
-- the setting log_dlq is on, one line of the server's log. Everybody who may read that log sees it, so it names only the endpoint.
-- Digests are owed even if the queue is full: there is one for each endpoint and subscriber. Events of ulak itself are in no digest, so that
-- no digest is about digests; the log counts them, too.
create or replace function ulak_private.tell_digests(p_now timestamptz)
returns void
language plpgsql
set jit = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_payloads jsonb[];
    v_lines text[];
begin
    with taken as materialized (
        delete from ulak_private.dead_counts
        returning *
    ),
    causes as (
        select
            t.endpoint_id,
            t.endpoint_name,
            t.event_type,
            t.cause,
            sum(t.letters) as letters,
            sum(t.skipped) as skipped,
            min(t.counted_at) as since,
            row_number() over (partition by t.endpoint_id, t.endpoint_name order by sum(t.letters) desc, t.event_type, t.cause) as place
        from taken t
        where not ulak_private.is_own_event(to_jsonb(t))
        group by t.endpoint_id, t.endpoint_name, t.event_type, t.cause
    ),
    digests as (
        select
            c.endpoint_id,
            jsonb_build_object(
                'type', 'ulak.endpoint.dead_letters',
                'at', p_now,
                'endpoint', c.endpoint_name,
                'since', min(c.since),
                'letters', sum(c.letters),
                'skipped', sum(c.skipped),
                'counts', jsonb_agg(
                    jsonb_strip_nulls(jsonb_build_object('event_type', c.event_type, 'error', c.cause, 'letters', c.letters))
                    order by c.place
                ) filter (where c.place <= 20),
                'others', coalesce(sum(c.letters) filter (where c.place > 20), 0)
            ) as payload
        from causes c
        group by c.endpoint_id, c.endpoint_name
    ),
    lines as (
        select jsonb_build_object('endpoint', t.endpoint_name, 'letters', sum(t.letters))::text as facts
        from taken t
        group by t.endpoint_id, t.endpoint_name
    )
    select
        (select array_agg(d.endpoint_id order by d.endpoint_id) from digests d),
        (select array_agg(d.payload order by d.endpoint_id) from digests d),
        (select array_agg('ulak: dead letters: ' || l.facts order by l.facts) from lines l)
    into v_endpoint_ids, v_payloads, v_lines;
    if v_payloads is not null then
        perform ulak_private.tell_operators('ulak.endpoint.dead_letters', v_endpoint_ids, v_payloads, true, p_now);
    end if;
    if ulak_private.stored_setting('log_dlq')::boolean then
        perform ulak_private.log(l) from unnest(v_lines) l;
    end if;
end
$plpgsql$;
