-- Which roles may send to which endpoints, publish which events, and work endpoints off with claim(), complete() and fail().

-- Roles are kept by name, so that a dump can be restored where they don't exist yet.
create table ulak.endpoint_grants (
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    role_name text not null,
    granted_at timestamptz not null default now(),
    -- As ulak_private.caller() has it.
    granted_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    may_work boolean not null default true,
    may_send boolean not null default false,
    primary key (endpoint_id, role_name)
);

comment on table ulak.endpoint_grants is 'roles that may claim from an endpoint, and roles that may send to a restricted one. Change it with ulak.grant_endpoint() and ulak.revoke_endpoint()';
comment on column ulak.endpoint_grants.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_grants.role_name is 'name of the role whose members may; a role that is renamed loses it';
comment on column ulak.endpoint_grants.granted_at is 'when the first of both rights was granted';
comment on column ulak.endpoint_grants.granted_by is 'the role that granted it';
comment on column ulak.endpoint_grants.may_work is 'true: the role may claim and settle its messages';
comment on column ulak.endpoint_grants.may_send is 'true: the role may send to it; once one role is allowed to, the others no longer are';
