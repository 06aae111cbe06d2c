-- Resume points: a session's claims begin where the last one ended while an old snapshot keeps vacuum from removing claimed messages' entries.
--
-- A claimed message leaves a dead entry in the index of waiting messages, and claims walk over these entries, 1.4 us each, until vacuum removes
-- them. Usually an entry is passed once and marked. After a claim from the beginning (a look) that passed more than 200 entries, and more than
-- two for each message that it got, the session's claims resume for 50 us per entry, at most 10 s, so looks take at most 3% of the time. The
-- next look finds messages that a resuming claim can't see, because another session had locked them or they were committed more than 0.1 s out
-- of order.

-- A session stores its resume points, their generation and the time until which they hold (in seconds since 1970) in a parameter, so that a
-- rollback resets them, too. A forged value harms only the claims of its own session.
create or replace function ulak_private.resume_points(p_generation bigint)
returns ulak_private.resume_point[]
language plpgsql
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
begin
    if (v_memory ->> 'until')::double precision - extract(epoch from clock_timestamp()) between 0 and 10
        and (v_memory ->> 'generation')::bigint is not distinct from p_generation
    then
        return ulak_private.remembered_places(v_memory);
    end if;
    return '{}';
end
$plpgsql$;

create or replace function ulak_private.remembered_places(p_memory jsonb)
returns ulak_private.resume_point[]
language sql
stable
as $sql$
    select array(select p from jsonb_populate_recordset(null::ulak_private.resume_point, p_memory -> 'places') p)
$sql$;

create or replace function ulak_private.set_resume_points(
    p_until double precision,
    p_generation bigint,
    p_places ulak_private.resume_point[]
)
returns void
language sql
as $sql$
    select set_config(
        'ulak_private.resume_points',
        jsonb_build_object('until', p_until, 'generation', p_generation, 'places', to_jsonb(p_places))::text,
        false
    )
$sql$;

-- Called after a claim that passed p_passed dead entries; p_is_look: it started from the beginning. The 64 places reached last are kept.
create or replace function ulak_private.remember_places(
    p_turn ulak_private.turn,
    p_is_look boolean,
    p_passed bigint,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz
)
returns void
language plpgsql
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
    v_now timestamptz := clock_timestamp();
    v_until double precision := v_memory ->> 'until';
    -- The places after the last message of each endpoint and priority.
    v_reached ulak_private.resume_point[] := array(
        select row(p_turn.endpoint_ids[l.place], l.priority, p_turn.due_ats[l.number], p_turn.ids[l.number] + 1)::ulak_private.resume_point
        from (
            select m.place, m.priority, max(m.number) as number
            from unnest(p_turn.places, p_turn.priorities) with ordinality m(place, priority, number)
            group by m.place, m.priority
        ) l
    );
begin
    if p_is_look then
        v_until := extract(epoch from v_now) + least(p_passed * 0.00005, 10);
        if v_reached = '{}' then
            -- The claim got nothing, so the entries that it passed belong to endpoints with nothing due.
            v_reached := array(
                select row(e.id, 0, p_now, 0)::ulak_private.resume_point
                from ulak.endpoints e
                where case
                        when p_endpoint_ids is not null then e.id = any (p_endpoint_ids)
                        else p_protocols is null or e.protocol = any (p_protocols)
                    end
                    and not ulak_private.has_due(e.id, p_now, '{}')
                order by e.id
                limit 32
            );
        end if;
    elsif v_reached = '{}' then
        return;
    end if;
    if (v_memory ->> 'generation')::bigint is distinct from p_generation then
        v_memory := null;
    end if;
    perform ulak_private.set_resume_points(v_until, p_generation, array(
        select row(
            k.endpoint_id,
            k.priority,
            least(k.due_at, v_now - interval '0.1 s'),
            case when k.due_at <= v_now - interval '0.1 s' then k.id else 0 end
        )::ulak_private.resume_point
        from (
            select distinct on (r.endpoint_id, r.priority) r.*
            from unnest(ulak_private.remembered_places(v_memory) || v_reached) with ordinality r(endpoint_id, priority, due_at, id, number)
            order by r.endpoint_id, r.priority, r.number desc
        ) k
        order by k.number desc
        limit 64
    ));
end
$plpgsql$;

-- Moves resume points back to messages that became due at times that the session's claims may have passed already.
create or replace function ulak_private.step_back(p_places ulak_private.resume_point[])
returns void
language plpgsql
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
begin
    if p_places is not null and current_setting('ulak_private.plain_place', true) <> '' then
        perform set_config('ulak_private.plain_place', '', false);
    end if;
    if v_memory is not null and p_places is not null then
        perform ulak_private.set_resume_points(
            (v_memory ->> 'until')::double precision,
            (v_memory ->> 'generation')::bigint,
            array(
                select (
                    select n
                    from unnest(p_places || r) n
                    where n.endpoint_id = r.endpoint_id and n.priority = r.priority
                    order by n.due_at, n.id
                    limit 1
                )
                from unnest(ulak_private.remembered_places(v_memory)) r
            )
        );
    end if;
end
$plpgsql$;

-- How many dead entries of the index of waiting messages this transaction has read.
create or replace function ulak_private.passed_entries()
returns bigint
language sql
as $sql$
    select pg_catalog.pg_stat_get_xact_tuples_returned('ulak_private.deliveries_pending_idx'::pg_catalog.regclass)
        operator(pg_catalog.-) pg_catalog.pg_stat_get_xact_tuples_fetched('ulak_private.deliveries_pending_idx'::pg_catalog.regclass)
$sql$;
