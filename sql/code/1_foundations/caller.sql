-- The caller: the role whose rights a call has, and the one that is recorded as the sender of a message.

-- The role that the session was set to (SET ROLE, or the role of ALTER ROLE ... SET role), else the one that logged in. So a pooler's login
-- with many roles has the rights of the role that it has set, and SECURITY DEFINER functions don't lend their owner's rights: they change
-- current_user, but neither of these two. Not parallel safe: a parallel worker's current_setting('role') isn't that of its leader.
create or replace function ulak_private.caller()
returns name
language sql
stable
as $sql$
    select case
        when pg_catalog.current_setting('role') operator(pg_catalog.=) 'none' then session_user
        else pg_catalog.current_setting('role')::pg_catalog.name
    end
$sql$;

-- Whether the caller has the rights of one of ulak's roles, as PostgreSQL would give them without another SET ROLE.
create or replace function ulak_private.caller_has(p_role name)
returns boolean
language sql
stable
as $sql$
    select pg_catalog.pg_has_role(ulak_private.caller(), p_role, 'usage')
$sql$;
