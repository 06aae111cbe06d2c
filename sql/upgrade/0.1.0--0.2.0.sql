-- From 0.1.0 to 0.2.0: what replaying sql/code can't do. Each step says what it locks, and for how long.

-- Locks: a new, empty table; nobody waits.

create table ulak.locks (
    name text primary key
);

comment on table ulak.locks is 'one row per thing that one transaction at a time may do; private to ulak';
comment on column ulak.locks.name is 'what the row''s lock stands for, as in sql/code/05_locks.sql';
select pg_catalog.pg_extension_config_dump('ulak.locks', 'where false');

drop function ulak._lock_configs();

-- Sending, ordering and claiming.

-- Roles and the gate.

-- A role of the cluster; sql/code/07_roles.sql looks at one that is there already. Nobody waits.
do $plpgsql$
begin
    if to_regrole('ulak_consumer') is null then
        create role ulak_consumer nologin;
    end if;
exception
    when duplicate_object or unique_violation then
        null;
end
$plpgsql$;

-- A new, empty table. Its foreign key locks ulak.endpoints against writers (share row exclusive) until the upgrade commits.
create table ulak.endpoint_grants (
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    role_name text not null,
    granted_at timestamptz not null default now(),
    granted_by text not null default session_user,
    primary key (endpoint_id, role_name)
);

comment on table ulak.endpoint_grants is 'endpoints that members of ulak_consumer may work off. Change it with ulak.grant_endpoint() and ulak.revoke_endpoint()';
comment on column ulak.endpoint_grants.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_grants.role_name is 'name of the role whose members may; a role that is renamed loses it';
comment on column ulak.endpoint_grants.granted_at is 'when it was granted';
comment on column ulak.endpoint_grants.granted_by is 'the session user who granted it';
select pg_catalog.pg_extension_config_dump('ulak.endpoint_grants', '');

drop function ulak._are_networks(text);

-- As configure() stores networks now: 10.1/16 was accepted, and no worker understood it. One row, if any.
update ulak.setting_values v
set value = coalesce(
    (
        select string_agg(n.network::cidr::text, ',' order by n.place)
        from unnest(string_to_array(v.value, ',')) with ordinality n(network, place)
    ),
    ''
)
where v.name = 'http_allowed_networks';

-- Workers and their schedule.

-- Looks and statistics.

-- Times, archive and maintenance.
