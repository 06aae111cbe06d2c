-- After the code: what sessions still use that were in the middle of a function of 0.2.0, or run its Python, and 0.2.0--0.3.0.move.sql has
-- not made of what there is. An upgrade leaves it, a fresh installation hasn't got it, and ulak_private.forget_0_2_0() takes it away: the
-- next release begins with that.

create or replace function ulak._tell_operators(p_event_type text, p_endpoint_ids bigint[], p_payloads jsonb[], p_now timestamptz)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.tell_operators(p_event_type, p_endpoint_ids, p_payloads, false, p_now)
$sql$;

create or replace function ulak._missing_client(p_protocol text)
returns text
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.missing_client(p_protocol, '{}')
$sql$;

create or replace function ulak._enqueue(p_messages ulak_private.message[])
returns bigint[]
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.enqueue(p_messages)
$sql$;

create or replace function ulak._enqueue(p_mailing ulak_private.mailing)
returns bigint[]
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.enqueue(p_mailing.messages, p_mailing.places, p_mailing.endpoint_ids)
$sql$;

create or replace function ulak._require_room(p_last_id bigint, p_count integer)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.check_backpressure(p_last_id, p_count)
$sql$;

create or replace function ulak._refuse_operator_event(p_id bigint)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.require_changeable(p_id)
$sql$;

create or replace function ulak._endpoint_configs(p_ids bigint[], p_now timestamptz default clock_timestamp())
returns table (
    id bigint,
    name text,
    config_version bigint,
    config jsonb,
    signing_secrets text[],
    secrets text[],
    protocol text
)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select c.id, c.name, c.config_version, coalesce(c.config, '{}'), c.signing_secrets, c.secrets, c.protocol
    from ulak_private.endpoint_configs(p_ids, p_now) c
$sql$;

create or replace function ulak._check_login(p_user text)
returns table (item text, status text, detail text, fix text)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select c.item, c.status, c.detail, c.fix
    from ulak_private.login_steps(p_user) c
$sql$;

create or replace function ulak._is_charged(p_endpoint ulak.endpoints)
returns boolean
language sql
stable
as $sql$
    select ulak_private.is_metered(p_endpoint)
$sql$;

create or replace function ulak._counts_deliveries(p_endpoint ulak.endpoints)
returns boolean
language sql
stable
as $sql$
    select ulak_private.success_changes_breaker(p_endpoint)
$sql$;

create or replace function ulak._notes_deliveries(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select ulak_private.success_changes_endpoint(p_endpoint, p_now)
$sql$;

create or replace function ulak._granted_endpoints()
returns setof bigint
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select distinct g.endpoint_id
    from ulak.endpoint_grants as g
    join pg_roles as r on r.rolname = g.role_name
    where g.may_work and pg_has_role(ulak_private.caller(), r.oid, 'usage')
$sql$;

create or replace function ulak._require_endpoint(p_id bigint, p_name text)
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.workable_endpoints(p_name) is not null
$sql$;

create or replace function ulak._require_message(p_id bigint)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if (ulak_private.workable_messages(array[p_id]))[1] is null then
        perform ulak_private.raise_foreign_message(p_id);
    end if;
    return true;
end
$plpgsql$;

-- As workers call it, by the names of its parameters. A claim knows by itself where the last one ended.
create or replace function ulak._claim(
    p_resume ulak_private.place,
    p_worker text,
    p_limit integer,
    p_lease interval,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_rooms ulak_private.rooms,
    p_most_endpoints integer
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
    idempotency_key text,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz,
    circuit_state text,
    due_at timestamptz,
    may_have_more boolean,
    left_out_others boolean
)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select
        c.id, c.message_id, c.attempt, c.endpoint_id, c.config_version, c.payload, c.headers, c.metadata, c.correlation_id, c.ordering_key,
        c.priority, c.idempotency_key, c.created_at, c.expires_at, c.lease_until, c.circuit_state, c.due_at, c.may_have_more, c.left_out_others
    from ulak_private.claim(
        p_worker,
        p_limit,
        p_lease,
        p_endpoint_ids,
        p_protocols,
        p_rooms => p_rooms,
        p_most_endpoints => p_most_endpoints
    ) c
$sql$;

-- send(), send_many(), publish() and redrive_message(), as they were: an application's function (begin atomic) may depend on them by their oids.

create or replace function ulak_private.send_of_0_2_0(
    p_endpoint text,
    p_payload jsonb default null,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_raw text default null,
    p_content_type text default null,
    p_path text default null,
    p_timeout double precision default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.send(
        p_endpoint, p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_correlation_id, p_expires_at, p_ordering_key,
        p_headers, p_metadata, p_raw, p_content_type, p_path, p_timeout
    );
end
$plpgsql$;

create or replace function ulak_private.send_many_of_0_2_0(
    p_endpoints text[],
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
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.send_many(
        p_endpoints, p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_correlation_id, p_expires_at, p_ordering_key,
        p_headers, p_metadata
    );
end
$plpgsql$;

create or replace function ulak_private.publish_of_0_2_0(
    p_event_type text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_event_id uuid default null
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.publish(
        p_event_type, p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_correlation_id, p_expires_at, p_ordering_key,
        p_headers, p_metadata, p_event_id
    );
end
$plpgsql$;

create or replace function ulak_private.redrive_message_of_0_2_0(
    p_dlq_id bigint,
    p_by text default session_user,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak.redrive_message(p_dlq_id, p_by, p_now);
end
$plpgsql$;

create aggregate ulak._sum_histograms(p_histogram bigint[]) (
    sfunc = ulak_private.add_histograms,
    stype = bigint[],
    initcond = '{}'
);

-- Claims nothing: a worker of 0.2.0 then asks ulak._claim().
create or replace function ulak._light_turn(
    p_worker text,
    p_after bigint,
    p_count integer,
    p_lease interval,
    p_ids bigint[],
    p_attempts integer[],
    p_now timestamptz default null,
    p_protocols text[] default null
)
returns table (
    id bigint,
    is_new boolean,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    created_at timestamptz
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        s.id, false, null::uuid, null::integer, null::bigint, null::bigint, null::jsonb, null::jsonb, null::jsonb, null::uuid, null::timestamptz
    from unnest(ulak_private.settle_many(p_worker, p_ids, p_attempts, p_now => p_now)) s(id)
$sql$;

create or replace function ulak._request_wake_ups(out notified_to bigint, out last_sent bigint, out has_pending boolean)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select r.last_sent + 16, r.last_sent, exists (select from ulak_private.deliveries q where q.status = 'pending')
    from ulak_private.request_wake_ups() r(last_sent)
$sql$;

-- Inserts into ulak.queue, ulak.archive and ulak.dlq, which were tables.

create or replace function ulak._insert_as_0_2_0()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_columns text := (
        select string_agg(quote_ident(a.attname), ', ' order by a.attnum)
        from pg_attribute a
        where a.attrelid = tg_relid and a.attnum > 0 and not a.attisdropped and a.attname not in ('sent_by', 'max_retries')
    );
begin
    execute format(
        'insert into ulak_private.%I (%s) overriding system value select %s from (select ($1).*) n', tg_argv[0], v_columns, v_columns
    )
    using new;
    if tg_argv[0] = 'deliveries' then
        insert into ulak_private.idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, free_at)
        select
            q.endpoint_id,
            q.idempotency_key,
            q.id,
            q.payload_hash,
            case when q.status = 'completed' then q.completed_at + make_interval(secs => ulak_private.stored_setting('archive_after')::integer) end
        from ulak_private.deliveries q
        where q.id = new.id and q.idempotency_key is not null and q.status in ('pending', 'processing', 'completed')
        on conflict do nothing;
    end if;
    return new;
end
$plpgsql$;

-- With the defaults that the columns have in the tables.
do $plpgsql$
declare
    v_column record;
begin
    for v_column in
        select
            v.name,
            a.attname,
            coalesce(pg_catalog.pg_get_expr(d.adbin, d.adrelid), $$nextval('ulak_private.dlq_id_seq')$$) as expression
        from (values ('queue', 'deliveries'), ('archive', 'archived'), ('dlq', 'letters')) v (name, stored_in)
        join pg_catalog.pg_attribute a on a.attrelid = pg_catalog.format('ulak_private.%I', v.stored_in)::regclass
        left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where d.adbin is not null or a.attidentity <> ''
    loop
        execute pg_catalog.format(
            'alter view ulak.%I alter column %I set default %s', v_column.name, v_column.attname, v_column.expression
        );
    end loop;
end
$plpgsql$;

create or replace trigger queue_insert_as_0_2_0
    instead of insert on ulak.queue
    for each row
    execute function ulak._insert_as_0_2_0('deliveries');

create or replace trigger archive_insert_as_0_2_0
    instead of insert on ulak.archive
    for each row
    execute function ulak._insert_as_0_2_0('archived');

create or replace trigger dlq_insert_as_0_2_0
    instead of insert on ulak.dlq
    for each row
    execute function ulak._insert_as_0_2_0('letters');

-- Tables by their old names.
do $plpgsql$
declare
    v_name text;
begin
    foreach v_name in array array[
        'archive_default', 'cluster_home', 'cluster_identity', 'endpoint_headroom', 'locks', 'maintenance_runs', 'ordering_keys', 'schedule', 'secrets'
    ]
    loop
        execute format('create view ulak.%1$I as select * from ulak_private.%1$I', v_name);
    end loop;
end
$plpgsql$;

-- Sequences have no second names. What these hold is a hint, or a count: nothing depends on a value that gets lost.
create sequence ulak.bell;
create sequence ulak.claim_position;
create sequence ulak.messages_cancelled;
create sequence ulak.pull_position;
create sequence ulak.queue_headroom minvalue -9223372036854775807 start 1;

-- Each is granted as what has its name now.
do $plpgsql$
declare
    v_statement text;
begin
    execute 'revoke all on all routines in schema ulak from public';
    for v_statement in
        select distinct format('grant execute on routine %s to %I', o.oid::regprocedure, a.grantee::regrole)
        from pg_proc o
        join pg_proc p on p.pronamespace = 'ulak_private'::regnamespace and '_' || p.proname = o.proname
        cross join lateral aclexplode(p.proacl) a
        where o.pronamespace = 'ulak'::regnamespace and o.proname like E'\\_%' and a.grantee <> p.proowner
    loop
        execute v_statement;
    end loop;
end
$plpgsql$;
grant execute on function ulak._light_turn(text, bigint, integer, interval, bigint[], integer[], timestamptz, text[]) to ulak_worker, ulak_node;

-- For the owner, when no session is older than the upgrade.
create function ulak_private.forget_0_2_0()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_kind text;
    v_name text;
begin
    for v_kind, v_name in
        select 'routine', p.oid::regprocedure::text
        from pg_proc p
        where p.pronamespace = 'ulak'::regnamespace and p.proname like E'\\_%'
        union all
        select 'domain', t.oid::regtype::text
        from pg_type t
        where t.typnamespace = 'ulak'::regnamespace and t.typtype = 'd'
        union all
        select case c.relkind when 'v' then 'view' else 'sequence' end, c.oid::regclass::text
        from pg_class c
        where c.relnamespace = 'ulak'::regnamespace
            and (
                c.relkind = 'v' and obj_description(c.oid, 'pg_class') is null
                or c.relkind = 'S' and c.relname in ('bell', 'claim_position', 'messages_cancelled', 'pull_position', 'queue_headroom')
            )
        union all
        select 'routine', 'ulak_private.forget_0_2_0()'
    loop
        if exists (select from pg_extension e where e.extname = 'ulak') then
            execute format('alter extension ulak drop %s %s', v_kind, v_name);
        end if;
        -- Triggers of the views go with their function.
        execute format('drop %s %s%s', v_kind, v_name, case when v_name = 'ulak._insert_as_0_2_0()' then ' cascade' end);
    end loop;
    -- Earlier signatures stay as long as something depends on them.
    for v_name in
        select p.oid::regprocedure
        from pg_proc p
        where p.pronamespace = 'ulak_private'::regnamespace and p.proname ~ '_of_[0-9]'
    loop
        begin
            if exists (select from pg_extension e where e.extname = 'ulak') then
                execute format('alter extension ulak drop routine %s', v_name);
            end if;
            execute format('drop routine %s', v_name);
        exception
            when dependent_objects_still_exist then
                null;
        end;
    end loop;
    for v_name in
        select format('alter view %s alter column %I drop default', d.adrelid::regclass, a.attname)
        from pg_attrdef d
        join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
        where d.adrelid in ('ulak.queue'::regclass, 'ulak.archive'::regclass, 'ulak.dlq'::regclass)
    loop
        execute v_name;
    end loop;
end
$plpgsql$;

revoke all on function ulak_private.forget_0_2_0() from public;
