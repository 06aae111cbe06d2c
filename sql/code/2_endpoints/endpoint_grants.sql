-- Rights to send to an endpoint, to publish an event type, and to claim from an endpoint. An endpoint or an event type is open to all members
-- of ulak_application until the first grant to send. External workers, members of ulak_consumer, may claim only what was granted to them.

create or replace function ulak.grant_endpoint(p_name text, p_role text, p_right text default 'work')
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
    v_id bigint;
begin
    perform ulak_private.check_grant(p_role, p_right);
    v_endpoint := ulak_private.lock_endpoint(p_name);
    v_id := v_endpoint.id;
    if p_right = 'work' and v_endpoint.protocol <> 'pull' then
        raise notice 'endpoint "%" is of protocol %: workers deliver its messages, too', p_name, v_endpoint.protocol
            using
                detail = 'An external worker gets them only by name, before a worker does; claim() without a name never looks there.',
                hint = format('select * from ulak.claim(''worker'', 1, %L);', p_name);
    end if;
    insert into ulak.endpoint_grants as g (endpoint_id, role_name, may_work, may_send)
    values (v_id, p_role, p_right = 'work', p_right = 'send')
    on conflict (endpoint_id, role_name) do update
    set may_work = g.may_work or excluded.may_work, may_send = g.may_send or excluded.may_send
    where not case when p_right = 'send' then g.may_send else g.may_work end;
    if not found then
        return false;
    end if;
    perform ulak_private.apply_senders(v_id);
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.granted', v_id, p_name, jsonb_build_object('role', p_role, 'right', p_right));
    perform ulak_private.note_missing_role(p_role, case when p_right = 'send' then 'ulak_application' else 'ulak_consumer' end);
    return true;
end
$plpgsql$;

comment on function ulak.grant_endpoint(text, text, text) is
    'gives a role and its members a right to an endpoint: to claim and settle its messages (p_right ''work''), or to send to '
    'it and to see and change what waits there (''send''). The first grant to send closes the endpoint to everybody else. '
    'False if the role had the right already';

create or replace function ulak.revoke_endpoint(p_name text, p_role text, p_right text default 'work')
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
begin
    perform ulak_private.check_right(p_right);
    v_id := (ulak_private.lock_endpoint(p_name)).id;
    update ulak.endpoint_grants as g
    set may_work = g.may_work and p_right <> 'work', may_send = g.may_send and p_right <> 'send'
    where g.endpoint_id = v_id
        and g.role_name = p_role
        and case when p_right = 'send' then g.may_send else g.may_work end;
    if not found then
        return false;
    end if;
    delete from ulak.endpoint_grants as g where g.endpoint_id = v_id and g.role_name = p_role and not g.may_work and not g.may_send;
    perform ulak_private.apply_senders(v_id);
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.revoked', v_id, p_name, jsonb_build_object('role', p_role, 'right', p_right));
    if p_right = 'send' and not exists (select from ulak.endpoints as e where e.id = v_id and e.is_restricted) then
        raise notice 'endpoint "%" is open to all of ulak_application again', p_name
            using hint = format('To keep it closed: select ulak.grant_endpoint(%L, ''ulak_admin'', ''send'');', p_name);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.revoke_endpoint(text, text, text) is
    'takes a right to an endpoint (''work'' or ''send'') away from a role; messages that it has claimed return to the queue '
    'when their leases end. False if it was not granted';

create or replace function ulak.grant_event_type(p_name text, p_role text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.refuse_reserved_event_type(p_name);
    perform ulak_private.check_grant(p_role, 'send');
    perform ulak_private.lock_event_type(p_name);
    insert into ulak.event_type_grants (event_type, role_name)
    values (p_name, p_role)
    on conflict (event_type, role_name) do nothing;
    if not found then
        return false;
    end if;
    update ulak.event_types as t set is_restricted = true where t.name = p_name;
    insert into ulak.event_log (event, detail)
    values ('event_type.granted', jsonb_build_object('event_type', p_name, 'role', p_role));
    perform ulak_private.note_missing_role(p_role, 'ulak_application');
    return true;
end
$plpgsql$;

comment on function ulak.grant_event_type(text, text) is
    'lets a role and its members publish an event type; the first grant closes the event type to everybody else. False if the'
    ' role had the right already';

create or replace function ulak.revoke_event_type(p_name text, p_role text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.lock_event_type(p_name);
    delete from ulak.event_type_grants as g where g.event_type = p_name and g.role_name = p_role;
    if not found then
        return false;
    end if;
    update ulak.event_types as t
    set is_restricted = exists (select from ulak.event_type_grants as g where g.event_type = p_name)
    where t.name = p_name;
    insert into ulak.event_log (event, detail)
    values ('event_type.revoked', jsonb_build_object('event_type', p_name, 'role', p_role));
    if not exists (select from ulak.event_type_grants as g where g.event_type = p_name) then
        raise notice 'event type "%" is open to all of ulak_application again', p_name
            using hint = format('To keep it closed: select ulak.grant_event_type(%L, ''ulak_admin'');', p_name);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.revoke_event_type(text, text) is 'takes back a role''s right to publish an event type; false if it was not granted';

create or replace function ulak_private.check_right(p_right text)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_right is null or p_right not in ('work', 'send') then
        raise exception 'unknown right %', coalesce('"' || left(p_right, 64) || '"', 'null')
            using errcode = '22023', hint = 'work: claim and settle. send: send, cancel, reschedule and look up.';
    end if;
end
$plpgsql$;

create or replace function ulak_private.check_grant(p_role text, p_right text)
returns void
language plpgsql
stable
as $plpgsql$
begin
    perform ulak_private.check_right(p_right);
    if not exists (select from pg_roles as r where r.rolname = p_role) then
        raise exception 'role % does not exist', coalesce('"' || left(p_role, 200) || '"', 'null')
            using errcode = '42704', hint = 'Give the name of a role as it is in pg_roles, without quotes.';
    end if;
end
$plpgsql$;

-- Sets is_restricted, which send() looks at. The caller has locked the endpoint.
create or replace function ulak_private.apply_senders(p_endpoint_id bigint)
returns void
language sql
as $sql$
    update ulak.endpoints as e
    set is_restricted = not e.is_restricted
    where e.id = p_endpoint_id
        and e.is_restricted <> exists (select from ulak.endpoint_grants as g where g.endpoint_id = p_endpoint_id and g.may_send)
$sql$;

create or replace function ulak_private.note_missing_role(p_role text, p_needed text)
returns void
language plpgsql
as $plpgsql$
begin
    if not pg_has_role(p_role, p_needed, 'usage')
        and not pg_has_role(p_role, case p_needed when 'ulak_consumer' then 'ulak_worker' else 'ulak_admin' end, 'usage')
    then
        raise notice 'role "%" does not have the rights of % yet', p_role, p_needed using hint = ulak_private.grant_command(p_needed, p_role);
    end if;
end
$plpgsql$;

-- Whether the caller was granted a right to an endpoint: most were, by their own name.
create or replace function ulak_private.is_granted(p_endpoint_id bigint, p_right text)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_caller text := ulak_private.caller();
begin
    perform
    from ulak.endpoint_grants g
    where g.endpoint_id = p_endpoint_id and g.role_name = v_caller and case p_right when 'send' then g.may_send else g.may_work end;
    return found or exists (
        select
        from ulak.endpoint_grants g
        join pg_roles r on r.rolname = g.role_name
        where g.endpoint_id = p_endpoint_id
            and case p_right when 'send' then g.may_send else g.may_work end
            and pg_has_role(v_caller, r.oid, 'usage')
    );
end
$plpgsql$;

-- Whether the caller may send to a restricted endpoint.
create or replace function ulak_private.may_send(p_endpoint_id bigint)
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return ulak_private.is_granted(p_endpoint_id, 'send') or ulak_private.caller_has('ulak_admin');
end
$plpgsql$;

-- Whether the caller may see the messages of a restricted endpoint.
create or replace function ulak_private.may_look(p_endpoint_id bigint)
returns boolean
language sql
stable
as $sql$
    select ulak_private.caller_has('ulak_monitor') or ulak_private.may_send(p_endpoint_id)
$sql$;

create or replace function ulak_private.may_publish(p_event_type text)
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return ulak_private.caller_has('ulak_admin') or exists (
        select
        from ulak.event_type_grants as g
        join pg_roles as r on r.rolname = g.role_name
        where g.event_type = p_event_type and pg_has_role(ulak_private.caller(), r.oid, 'usage')
    );
end
$plpgsql$;

-- The id of an endpoint that the caller may send to, or an error.
create or replace function ulak_private.sendable_endpoint(p_name text)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_id bigint;
    v_is_refused boolean;
begin
    select e.id, e.is_restricted and not ulak_private.may_send(e.id) into v_id, v_is_refused
    from ulak.endpoints e
    where e.name = p_name;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_name);
    elsif v_is_refused then
        perform ulak_private.raise_not_granted(p_name, 'send');
    end if;
    return v_id;
end
$plpgsql$;

-- p_right: send or work for an endpoint, publish for an event type.
create or replace function ulak_private.raise_not_granted(p_name text, p_right text)
returns void
language plpgsql
as $plpgsql$
declare
    v_call text := case p_right
        when 'publish' then 'ulak.grant_event_type(%L, %L)'
        when 'send' then 'ulak.grant_endpoint(%L, %L, ''send'')'
        else 'ulak.grant_endpoint(%L, %L)'
    end;
begin
    raise exception '% "%" is not granted to "%"',
        case p_right when 'publish' then 'event type' else 'endpoint' end, left(p_name, 200), ulak_private.caller()
        using
            errcode = '42501',
            detail = case p_right
                when 'publish' then 'Other roles were granted to publish it, so it is closed to the rest.'
                when 'send' then 'Other roles were granted to send to it, so it is closed to the rest.'
                else 'External workers may claim only from endpoints that were granted to them.'
            end,
            hint = format('An administrator can: select ' || v_call || ';', left(p_name, 200), ulak_private.caller())
                || case p_right when 'send' then ' The same holds for a trigger that sends: the role that counts is the one that writes to the table.' else '' end;
end
$plpgsql$;

-- True, or an error. Applications may see and change the messages of endpoints that they may send to.
create or replace function ulak_private.require_sender(p_message_id bigint, p_endpoint_id bigint, p_is_look boolean default false)
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    if exists (select from ulak.endpoints as e where e.id = p_endpoint_id and e.is_restricted)
        and not (case when p_is_look then ulak_private.may_look(p_endpoint_id) else ulak_private.may_send(p_endpoint_id) end)
    then
        perform ulak_private.raise_foreign_message(p_message_id);
    end if;
    return true;
end
$plpgsql$;

-- Whether the caller needs no grant to claim: administrators and members of ulak_worker.
create or replace function ulak_private.works_everywhere()
returns boolean
language sql
stable
as $sql$
    select ulak_private.caller_has('ulak_worker') or ulak_private.caller_has('ulak_admin')
$sql$;

create or replace function ulak_private.may_work(p_endpoint_id bigint)
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return ulak_private.works_everywhere() or ulak_private.is_granted(p_endpoint_id, 'work');
end
$plpgsql$;

-- The endpoints that an external worker claims from: the one that it names, or every pull endpoint that was granted to it; null: any. An
-- unknown endpoint gives the same error as one that wasn't granted, so that a consumer doesn't learn which endpoints there are.
create or replace function ulak_private.workable_endpoints(p_name text)
returns bigint[]
language plpgsql
as $plpgsql$
declare
    v_id bigint;
begin
    if p_name is not null then
        select e.id into v_id
        from ulak.endpoints e
        where e.name = p_name;
        if v_id is not null and ulak_private.may_work(v_id) then
            return array[v_id];
        elsif ulak_private.works_everywhere() then
            perform ulak_private.raise_unknown_endpoint(p_name);
        end if;
        perform ulak_private.raise_not_granted(p_name, 'work');
    elsif ulak_private.works_everywhere() then
        return null;
    end if;
    return array(
        select g.endpoint_id
        from (
            select distinct g.endpoint_id
            from ulak.endpoint_grants g
            join pg_roles r on r.rolname = g.role_name
            where g.may_work and pg_has_role(ulak_private.caller(), r.oid, 'usage')
        ) g
        join ulak.endpoints e on e.id = g.endpoint_id
        where e.protocol = 'pull'
        -- In a fixed order, the first endpoints would use up a small limit each time.
        order by random()
    );
end
$plpgsql$;

-- The same ids, with null for messages that the caller may not settle: for the caller they don't exist.
create or replace function ulak_private.workable_messages(p_ids bigint[])
returns bigint[]
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_foreign bigint[];
begin
    if ulak_private.works_everywhere() then
        return p_ids;
    end if;
    select array_agg(i) into v_foreign
    from (
        select q.endpoint_id, array_agg(q.id) as ids
        from unnest(p_ids) r(id)
        join ulak_private.deliveries q on q.id between r.id and r.id
        group by q.endpoint_id
        offset 0
    ) e
    cross join unnest(e.ids) i
    where not ulak_private.may_work(e.endpoint_id);
    if v_foreign is null then
        return p_ids;
    end if;
    return array(
        select case when r.id <> all (v_foreign) then r.id end
        from unnest(p_ids) with ordinality r(id, place)
        order by r.place
    );
end
$plpgsql$;

create or replace function ulak_private.raise_foreign_message(p_id bigint)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'message % does not exist, or its endpoint is not granted to "%"', p_id, ulak_private.caller()
        using
            errcode = '42501',
            detail = 'Nothing was changed.',
            hint = 'An administrator can: select ulak.grant_endpoint(...);';
end
$plpgsql$;
