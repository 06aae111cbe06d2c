-- A turn of an external worker: it settles what was done and leases more.
--
-- The usual claim has a way of its own, a special case of take_turn(), only for speed: it names one endpoint, which has no limits and nothing
-- waiting above priority 0. lock_plain() locks its messages. If it meets anything else, nothing has been changed yet, and take_turn() does it
-- all. A claim of 25 messages takes 3.2 million instructions instead of 3.9, one of a single message 1.1 instead of 1.8.

create or replace function ulak.work(
    p_worker text,
    p_limit integer,
    p_endpoint text default null,
    p_ids bigint[] default '{}',
    p_attempts integer[] default '{}',
    p_errors text[] default null,
    p_retry_after interval[] default null,
    p_responses jsonb[] default null,
    p_lease interval default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp()
)
returns table (
    outcome text,
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint text,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    idempotency_key text,
    priority smallint,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_settled bigint[];
    v_turn ulak_private.turn;
    v_finder bigint;
begin
    p_now := ulak_private.clock(p_now);
    -- A `perform` takes 10 us, so only a call that may be wrong gets there.
    if ulak_private.is_valid_turn(p_worker, p_limit, p_lease) is not true then
        perform ulak_private.check_claim(p_worker, case when p_limit = 0 then 1 else p_limit end, p_lease);
    end if;
    if p_generation is not null then
        perform ulak_private.check_generation(p_generation);
    end if;
    if p_ids <> '{}' or p_attempts <> '{}' then
        v_settled := ulak_private.settle_reports(p_worker, p_ids, p_attempts, p_errors, p_retry_after, p_responses, p_now);
        if cardinality(v_settled) < cardinality(p_ids) then
            outcome := 'lost';
            for id, attempt in select r.id, r.attempt from ulak_private.answers(p_ids, p_attempts, v_settled) r where not r.is_settled loop
                return next;
            end loop;
        end if;
    end if;
    v_turn := ulak_private.lock_work(p_limit, p_endpoint, p_generation, p_now);
    if v_turn.tids is null then
        return;
    end if;
    return query
    select
        'claimed', c.id, c.message_id, c.attempt, c.endpoint, c.payload, c.headers, c.metadata, c.correlation_id, c.ordering_key,
        c.idempotency_key, c.priority, c.created_at, c.expires_at, c.lease_until
    from ulak_private.lease_messages(v_turn, p_worker, ulak_private.exact(p_lease), p_now) c;
    -- See ulak.listen().
    if pg_sequence_last_value('ulak_private.last_finder'::regclass) is distinct from pg_backend_pid() then
        v_finder := setval('ulak_private.last_finder', pg_backend_pid());
    end if;
end
$plpgsql$;

comment on function ulak.work(text, integer, text, bigint[], integer[], text[], interval[], jsonb[], interval, bigint, timestamptz) is
    'one turn of an external worker: settles what it has done (p_errors: null for a message that succeeded, otherwise as in '
    'fail_many()) and leases up to p_limit more, as claim() does. Rows with outcome ''claimed'' are new messages; ''lost'' '
    'ones are reports that do not count, because the lease was lost';

-- Inlined.
create or replace function ulak_private.is_valid_turn(p_worker text, p_limit integer, p_lease interval)
returns boolean
language sql
immutable
as $sql$
    select p_worker <> '' and octet_length(p_worker) <= 512
        and p_limit between 0 and 10000
        and (p_lease is null or p_lease > interval '0' and p_lease <= interval '1 day')
$sql$;

-- Locks due messages of the endpoints that the caller may work on.
create or replace function ulak_private.lock_work(p_limit integer, p_endpoint text, p_generation bigint, p_now timestamptz)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    v_passed bigint := ulak_private.passed_entries();
    v_id bigint;
    v_is_plain boolean;
    v_endpoint_ids bigint[];
    v_turn ulak_private.turn;
begin
    select e.id, e.is_plain into v_id, v_is_plain from ulak_private.requested_endpoint(p_endpoint, p_generation) e;
    v_endpoint_ids := case
        when v_id is not null and ulak_private.may_work(v_id) then array[v_id]
        else ulak_private.workable_endpoints(p_endpoint)
    end;
    if p_limit = 0 then
        return v_turn;
    end if;
    if ulak_private.take_over_expired(v_endpoint_ids, p_now) = 0 and v_is_plain then
        v_turn := ulak_private.lock_plain(v_id, p_endpoint, p_limit, v_passed, p_now);
        if v_turn.is_last then
            return v_turn;
        end if;
    end if;
    v_turn := ulak_private.take_turn(
        p_limit,
        v_endpoint_ids,
        -- Endpoints of all other protocols are left to ulak's own workers and nodes, unless one is asked for by name.
        case when p_endpoint is null then '{pull}'::text[] end,
        p_generation,
        p_now,
        null,
        32,
        -- An external worker that got nothing can't know that it should claim again at once.
        1000000
    );
    if v_turn.tids is not null and cardinality(v_turn.endpoint_ids) > 1 then
        v_turn := ulak_private.in_turn(v_turn);
    end if;
    return v_turn;
end
$plpgsql$;

-- External workers get messages of several endpoints by turns; ulak's own sort them anyway.
create or replace function ulak_private.in_turn(p_turn ulak_private.turn)
returns ulak_private.turn
language plpgsql
as $plpgsql$
begin
    select array_agg(m.tid order by m.round, m.number), array_agg(m.id order by m.round, m.number), array_agg(m.place order by m.round, m.number)
    into p_turn.tids, p_turn.ids, p_turn.places
    from (
        select m.*, row_number() over (partition by m.place order by m.number) as round
        from unnest(p_turn.tids, p_turn.ids, p_turn.places) with ordinality m(tid, id, place, number)
    ) m;
    return p_turn;
end
$plpgsql$;

-- The endpoint of this name, and whether lock_plain() may lock its messages. Stable, so that it is inlined.
create or replace function ulak_private.requested_endpoint(p_name text, p_generation bigint)
returns table (id bigint, is_plain boolean)
language sql
stable
as $sql$
    select
        e.id,
        e.enabled
            and not ulak_private.is_limited(e)
            -- Before the next condition, which doesn't resume.
            and (
                coalesce(current_setting('ulak_private.resume_points', true), '') = ''
                or cardinality(ulak_private.resume_points(null)) = 0
            )
            and not exists (
                select
                from ulak_private.deliveries q
                where q.status = 'pending' and q.endpoint_id = e.id and q.priority > 0
            )
            -- The usual sign of is_adopted().
            and not exists (select from ulak_private.cluster_identity i where i.system_identifier <> ulak_private.system_identifier())
            and not exists (select from ulak_private.cluster_home h where h.timeline < ulak_private.timeline())
            and p_generation is null
            -- Of a session of ulak's own worker.
            and coalesce(current_setting('ulak_private.settings', true), '') = ''
    from ulak.endpoints e
    where e.name = p_name
$sql$;

-- Locks up to p_limit due messages of priority 0, as take_turn() does. Without tids: if is_last, nothing is due, else take_turn() has to
-- look, because messages are behind the head of their ordering key, or to resume in several places: of another
-- endpoint, too, or of priorities above 0, if many dead entries of those were passed since p_passed.
-- A session's claims resume where the last one ended, by the rules of resume.sql. That takes a third of the time with a place of its own.
create or replace function ulak_private.lock_plain(
    p_endpoint_id bigint,
    p_endpoint text,
    p_limit integer,
    p_passed bigint,
    p_now timestamptz
)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    v_turn ulak_private.turn;
    -- The endpoint, until when its place holds, and the place: due at that time (both times in microseconds), from that id on.
    v_memory bigint[] := nullif(current_setting('ulak_private.plain_place', true), '');
    v_now bigint := extract(epoch from clock_timestamp()) * 1000000.0;
    v_resumes boolean := coalesce(v_memory[2] - v_now between 0 and 10000000, false);
    v_passed bigint := ulak_private.passed_entries();
    v_last_due_at timestamptz;
    v_last_due bigint;
begin
    if v_passed - p_passed > 200 or v_resumes and v_memory[1] <> p_endpoint_id then
        return v_turn;
    end if;
    select array_agg(m.tid), array_agg(m.id), max(m.next_retry_at), min(m.event_at), max(m.event_at), count(m.head) = 0
    into v_turn.tids, v_turn.ids, v_last_due_at, v_turn.first_event_at, v_turn.last_event_at, v_turn.is_last
    from ulak_private.due_messages(
        p_endpoint_id,
        0::smallint,
        case when v_resumes then to_timestamp(v_memory[3]::double precision / 1000000.0::double precision) else '-infinity' end,
        case when v_resumes then v_memory[4] else 0 end,
        null,
        p_now,
        p_limit
    ) m;
    v_passed := ulak_private.passed_entries() - v_passed;
    if not v_turn.is_last then
        v_turn.tids := null;
        return v_turn;
    end if;
    if v_passed > 200
        and (v_turn.tids is not null or not v_resumes)
        and (v_resumes or v_passed > 200 + 2 * coalesce(cardinality(v_turn.tids), 0))
    then
        v_last_due := extract(epoch from coalesce(v_last_due_at, p_now)) * 1000000.0;
        v_memory := array[
            p_endpoint_id,
            case when v_resumes then v_memory[2] else v_now + least(v_passed * 50, 10000000) end,
            least(v_last_due, v_now - 100000),
            case when v_last_due <= v_now - 100000 then coalesce(v_turn.ids[cardinality(v_turn.ids)] + 1, 0) else 0 end
        ];
        perform set_config('ulak_private.plain_place', v_memory::text, false);
    end if;
    v_turn.names := array[p_endpoint];
    v_turn.places := array_fill(1, array[coalesce(cardinality(v_turn.tids), 0)]);
    return v_turn;
end
$plpgsql$;
