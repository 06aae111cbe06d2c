-- The last line of ulak.explain(): what happens to a message next and when, or why nothing will.

create or replace function ulak_private.explain_next(p_id bigint, p_status text, p_now timestamptz, out at timestamptz, out what text)
language plpgsql
stable
as $plpgsql$
begin
    case
        when p_status = 'pending' then
            select n.at, n.what into at, what from ulak_private.explain_waiting(p_id, p_now) n;
        when p_status = 'processing' then
            select
                greatest(q.lease_until, p_now),
                case
                    when q.lease_until > p_now then format(
                        'its worker settles it or renews the lease; if it goes silent, the message is recovered when the lease runs out, in %s',
                        ulak_private.short_duration(q.lease_until - p_now)
                    )
                    else 'the lease ran out. A worker or maintenance recovers it and retries it'
                        || case when ulak_private.count_alive(p_now) = 0 then ', but no worker is alive: call ulak.run_maintenance();' else '' end
                end
            into at, what
            from ulak_private.deliveries q
            where q.id = p_id;
        when p_status in ('failed', 'held') then
            what := ulak_private.explain_letter(p_id, p_status);
        else
            what := format('nothing. To send it again: select ulak.replay_message(%s);', p_id);
    end case;
    what := 'next: ' || what;
end
$plpgsql$;

create or replace function ulak_private.explain_letter(p_id bigint, p_status text)
returns text
language sql
stable
as $sql$
    select case
        when d.id is null then 'nothing. Its dead letter was deleted after dlq_retention_days'
        when d.status = 'redriven' then format('it continues as another message: select * from ulak.explain(%s);', d.redriven_message_id)
        when d.status = 'discarded' then 'nothing, its dead letter was discarded'
        when p_status = 'held' then format(
            'nothing, it is dead letter %1$s and holds ordering key "%2$s": %3$s. To try again: select ulak.redrive_message(%1$s); '
            'to give it up: select * from ulak.discard(p_ids => ''{%1$s}'');',
            d.id,
            d.ordering_key,
            ulak_private.waiting_behind(ulak_private.count_behind(p_id, d.endpoint_id, d.ordering_key))
        )
        else format('nothing, it is dead letter %1$s. To try again: select ulak.redrive_message(%1$s);', d.id)
    end
    from (select) one
    left join ulak_private.letters d on d.original_message_id = p_id
    order by d.id desc
    limit 1
$sql$;

-- The reasons are checked in the order in which they hold a message: those that don't pass by themselves come first.
create or replace function ulak_private.explain_waiting(p_id bigint, p_now timestamptz, out at timestamptz, out what text)
language plpgsql
stable
as $plpgsql$
declare
    v_message ulak_private.deliveries;
    v_endpoint ulak.endpoints;
    v_head record;
begin
    select q.* into v_message from ulak_private.deliveries q where q.id = p_id;
    select e.* into v_endpoint from ulak.endpoints e where e.id = v_message.endpoint_id;
    select q.id, q.status, d.next_retry_at as due_at into v_head
    from ulak_private.earlier_of_key(p_id, v_message.endpoint_id, v_message.ordering_key) q
    join ulak_private.deliveries d on d.id = q.id;
    if v_endpoint.id is null then
        what := format(
            'nothing, its endpoint was dropped. To remove it: select ulak.archive_single_to_dlq(%s, ''endpoint dropped'');', p_id
        );
    elsif not ulak_private.is_adopted() then
        what := format('nothing, %s. If this cluster is to deliver them: select ulak.adopt();', ulak_private.held_because());
    elsif v_message.expires_at <= p_now then
        at := v_message.expires_at;
        what := 'it has expired; a worker or maintenance marks it within a minute';
    elsif not v_endpoint.enabled then
        what := format('nothing, endpoint "%1$s" is disabled. To release what it holds: select ulak.enable_endpoint(%1$L);', v_endpoint.name);
    elsif v_head.id is not null then
        what := format(
            'it waits for its ordering key "%1$s" behind message %2$s, which is %3$s: select * from ulak.explain(%2$s);',
            v_message.ordering_key,
            v_head.id,
            case
                when v_head.status = 'pending' and v_head.due_at > p_now and isfinite(v_head.due_at)
                    then format('due in %s', ulak_private.short_duration(v_head.due_at - p_now))
                when v_head.status = 'held' then 'a dead letter that holds the key until it is redriven or discarded'
                else v_head.status
            end
        );
    elsif v_message.next_retry_at = 'infinity' and v_message.ordering_key is null then
        what := 'nothing, it is scheduled for a time that never comes';
    elsif v_message.next_retry_at = 'infinity' then
        what := format(
            'it is the first of its ordering key "%s" now, but still parked; %s',
            v_message.ordering_key,
            case
                when ulak_private.count_alive(p_now) > 0 then 'a sweep makes it due within ten seconds'
                else 'no worker is alive, so maintenance makes it due within a minute: call ulak.run_maintenance();'
            end
        );
    else
        select n.at, n.what into at, what from ulak_private.explain_turn(v_message, v_endpoint, p_now) n;
    end if;
end
$plpgsql$;

-- The first live message of the same ordering key, if it was sent before this one.
create or replace function ulak_private.earlier_of_key(p_id bigint, p_endpoint_id bigint, p_ordering_key text)
returns table (id bigint, status text)
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select q.id, q.status
    from ulak_private.deliveries q
    where q.endpoint_id = p_endpoint_id
        and q.ordering_key = p_ordering_key
        and q.status in ('pending', 'processing', 'held')
        and q.id < p_id
    order by q.id
    limit 1
$sql$;

-- Reasons that pass by themselves, and then: a worker's next turn.
create or replace function ulak_private.explain_turn(
    p_message ulak_private.deliveries,
    p_endpoint ulak.endpoints,
    p_now timestamptz,
    out at timestamptz,
    out what text
)
language plpgsql
stable
as $plpgsql$
declare
    v_due timestamptz := p_message.next_retry_at;
    v_tokens double precision := ulak_private.rate_tokens(p_endpoint, p_now);
    -- Null if nothing limits it.
    v_rate double precision := least(p_endpoint.release_rate, ulak_private.rate_limit(p_endpoint.config));
begin
    at := p_now;
    if v_due > p_now then
        at := v_due;
        what := format(
            case
                when p_message.retry_count > 0 then 'retry %2$s of %3$s, in %1$s'
                when p_message.attempts > 0 then 'a worker returned it unprocessed; it is due again in %1$s'
                else 'it is scheduled, and due in %1$s'
            end,
            ulak_private.short_duration(v_due - p_now),
            p_message.retry_count,
            coalesce(
                (select q.max_retries::text from ulak.queue q where q.id = p_message.id),
                (ulak_private.retry_defaults() || coalesce(p_endpoint.retry_policy, '{}')) ->> 'max_retries'
            )
        );
    elsif p_endpoint.protocol = any (ulak_private.worker_protocols()) and ulak_private.count_alive(p_now) = 0 then
        select null, case
            when b.is_new then format('a worker takes it; start() was called, and workers start %s', b.starts)
            when b.is_scheduled then format('no worker is alive; the next one starts %s. If none does: select * from ulak.doctor();', b.starts)
            when not ulak_private.has_python() then 'nothing, no node is alive: select * from ulak.doctor();'
            else 'nothing, no worker is alive: select * from ulak.start();'
        end
        into at, what
        from ulak_private.workers_begin(p_now) b;
    elsif ulak_private.is_cooling(p_endpoint, p_now) then
        at := p_endpoint.circuit_half_open_at;
        what := format(
            'the circuit of endpoint "%s" is open; one message is sent as a probe in %s',
            p_endpoint.name, ulak_private.short_duration(at - p_now)
        );
    elsif p_endpoint.circuit_state <> 'closed' and p_endpoint.circuit_probe_attempt is not null then
        what := format(
            'message %s probes the circuit of endpoint "%s"; if it gets through, the others follow',
            p_endpoint.circuit_probe_id, p_endpoint.name
        );
    elsif p_endpoint.circuit_state <> 'closed' then
        what := format('the circuit of endpoint "%s" is due for a probe, with a worker''s next claim', p_endpoint.name);
    elsif v_tokens < 1 then
        at := p_now + make_interval(secs => (1 - v_tokens) / v_rate);
        what := format(
            'endpoint "%s" is limited to %s; the next message may leave in %s',
            p_endpoint.name,
            case
                when v_rate >= 1 then round(v_rate::numeric, 2) || ' messages a second'
                when v_rate * 60 >= 1 then round((v_rate * 60)::numeric, 2) || ' messages a minute'
                else round((v_rate * 3600)::numeric, 2) || ' messages an hour'
            end,
            ulak_private.short_duration(at - p_now)
        );
    elsif ulak_private.count_in_flight(p_endpoint.id, p_endpoint.max_in_flight) >= p_endpoint.max_in_flight then
        what := format(
            'endpoint "%s" is at its limit of %s in flight; the next message leaves when one of them is done',
            p_endpoint.name, ulak_private.counted(p_endpoint.max_in_flight, 'message')
        );
    else
        what := ulak_private.explain_line(p_endpoint, p_now);
    end if;
end
$plpgsql$;

-- It is due and nothing holds it.
create or replace function ulak_private.explain_line(p_endpoint ulak.endpoints, p_now timestamptz)
returns text
language sql
stable
as $sql$
    select case
        when p_endpoint.protocol = 'pull' then 'an external worker claims it'
        when h.waiting > 100 and h.per_second >= 1 then format(
            'a worker takes it in turn; %s wait for this endpoint, and at %s a second all are delivered in about %s',
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now),
            round(h.per_second::numeric),
            ulak_private.short_duration(make_interval(secs => h.waiting / h.per_second))
        )
        else 'a worker takes it at its next turn'
    end
    from ulak_private.endpoint_facts(p_endpoint.id, p_now) h
$sql$;
