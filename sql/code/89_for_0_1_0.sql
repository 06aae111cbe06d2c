-- What sessions still call that were in the middle of a function of 0.1.0 when the extension was upgraded. Goes with the
-- release after this one.

-- A worker of 0.1.0 gets nothing, and leaves with its next check.
create or replace function ulak._claim(
    p_worker text,
    p_limit integer,
    p_protocol text,
    p_lease interval,
    p_room_ids bigint[],
    p_rooms integer[],
    p_room integer,
    p_mark_endpoint_id bigint,
    p_mark_priority smallint,
    p_mark_due_at timestamptz,
    p_mark_id bigint
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    priority smallint,
    created_at timestamptz,
    due_at timestamptz
)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select null::bigint, null::uuid, null::integer, null::bigint, null::bigint, null::jsonb, null::jsonb, null::jsonb,
        null::uuid, null::text, null::smallint, null::timestamptz, null::timestamptz
    where false
$sql$;

-- Whether it is the one that looks often: no more, but it must not die of the question, with requests under way.
create or replace function ulak._become_poller()
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select false
$sql$;

-- How senders woke a worker, and a worker asked for it.
create or replace function ulak._is_awaited(p_id bigint)
returns boolean
language sql
as $sql$
    select ulak._wants_wake_up(p_id)
$sql$;

create or replace function ulak._ring()
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._wake_workers()
$sql$;

create or replace function ulak._set_bell(out rings_to bigint, out last_sent bigint, out has_pending boolean)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select w.notified_to, w.last_sent, w.has_pending from ulak._request_wake_ups() w
$sql$;

-- A sender's look-ups. A message of a key is queued as due, and the claim sees what is before it.
create or replace function ulak._wait_for_endpoint(p_endpoint text)
returns bigint
language sql
as $sql$
    select ulak._endpoint_id(p_endpoint)
$sql$;

create or replace function ulak._is_behind(p_endpoint_id bigint, p_ordering_key text)
returns boolean
language plpgsql
as $plpgsql$
begin
    perform ulak._lock_ordering_key(p_endpoint_id, p_ordering_key);
    return false;
end
$plpgsql$;

-- publish(), as it was, and what it called.
create or replace function ulak._publish_of_0_1_0(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.publish(p_event_type, p_payload);
end
$plpgsql$;

create or replace function ulak._publish(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.publish(p_event_type, p_payload);
end
$plpgsql$;

-- send(), as it was.
create or replace function ulak._send_of_0_1_0(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.send(
        p_endpoint,
        p_payload,
        p_priority,
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        p_headers,
        p_metadata
    );
end
$plpgsql$;

-- How a send looked at the size of the queue.
create or replace function ulak._count_live(p_at_most bigint)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select
        (select count(*) from (select from ulak.queue q where q.status = 'pending' limit p_at_most) p)
        + (select count(*) from (select from ulak.queue q where q.status = 'processing' limit p_at_most) p)
$sql$;
