-- Who may work off which endpoint: external workers are members of ulak_consumer, and get what an administrator grants them.

create or replace function ulak.grant_endpoint(p_name text, p_role text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint := ulak._keep_endpoint(p_name);
begin
    if not exists (select from pg_roles as r where r.rolname = p_role) then
        raise exception 'role % does not exist', coalesce('"' || left(p_role, 200) || '"', 'null')
            using errcode = '42704', hint = 'Give the name of a role as it stands in pg_roles, without quotes.';
    end if;
    insert into ulak.endpoint_grants (endpoint_id, role_name)
    values (v_id, p_role)
    on conflict (endpoint_id, role_name) do nothing;
    if not found then
        return false;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.granted', v_id, p_name, jsonb_build_object('role', p_role));
    if not pg_has_role(p_role, 'ulak_consumer', 'member') and not pg_has_role(p_role, 'ulak_worker', 'member') then
        raise notice 'role "%" is not a member of ulak_consumer yet', p_role
            using hint = format('grant ulak_consumer to %I;', p_role);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.grant_endpoint(text, text) is
    'lets a role and its members claim and settle the messages of an endpoint; false if it may already';

create or replace function ulak.revoke_endpoint(p_name text, p_role text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
begin
    select e.id into v_id from ulak.endpoints as e where e.name = p_name;
    if not found then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    delete from ulak.endpoint_grants as g where g.endpoint_id = v_id and g.role_name = p_role;
    if not found then
        return false;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.revoked', v_id, p_name, jsonb_build_object('role', p_role));
    return true;
end
$plpgsql$;

comment on function ulak.revoke_endpoint(text, text) is
    'takes an endpoint from a role again; what it holds goes back when the leases are over. False if it was not granted';

-- Whether this session may work off every endpoint without a grant: administrators, and members of ulak_worker.
create or replace function ulak._works_everywhere()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select pg_has_role(session_user, 'ulak_worker', 'member') or pg_has_role(session_user, 'ulak_admin', 'member')
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
    where pg_has_role(session_user, r.oid, 'member')
$sql$;

-- True, or an error. The same one for an endpoint that doesn't exist: what else there is, is none of a consumer's business.
create or replace function ulak._require_endpoint(p_id bigint, p_name text)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak._works_everywhere()
        and (p_id is null or p_id not in (select g.id from ulak._granted_endpoints() as g (id)))
    then
        raise exception 'endpoint "%" is not granted to "%"', left(p_name, 200), session_user
            using
                errcode = '42501',
                hint = format('An administrator can: select ulak.grant_endpoint(%L, %L);', left(p_name, 200), session_user);
    end if;
    return true;
end
$plpgsql$;

-- The same for the endpoint of a message.
create or replace function ulak._require_message(p_id bigint)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak._works_everywhere()
        and exists (
            select
            from ulak._deliveries as q
            where q.id = p_id and q.endpoint_id not in (select g.id from ulak._granted_endpoints() as g (id))
        )
    then
        raise exception 'message % is for an endpoint that is not granted to "%"', p_id, session_user
            using
                errcode = '42501',
                detail = 'Nothing was changed.',
                hint = 'An administrator can: select ulak.grant_endpoint(...);';
    end if;
    return true;
end
$plpgsql$;
