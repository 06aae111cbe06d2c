-- The role that counts: whose rights a call has, and who sent a message.

-- The role that the session was set to (SET ROLE, or the role of ALTER ROLE ... SET role), else the one that logged in. So a pooler's login
-- that has many roles has the rights of the one that it has set, and no function with SECURITY DEFINER lends its owner's: it changes
-- current_user, and neither of these two. Not parallel safe: current_setting('role') of a parallel worker isn't that of its leader.
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

-- Whether the caller has the rights of a role of ulak's, as PostgreSQL would give them without another SET ROLE.
create or replace function ulak_private.caller_has(p_role name)
returns boolean
language sql
stable
as $sql$
    select pg_catalog.pg_has_role(ulak_private.caller(), p_role, 'usage')
$sql$;
