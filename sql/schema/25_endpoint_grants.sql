-- Which roles may work off which endpoints with claim(), complete() and fail().

-- Roles are kept by name, so that a dump can be restored where they don't exist yet.
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
