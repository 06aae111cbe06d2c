-- The owner is an administrator. If another database of the server has ulak, only its owner may grant these roles.
do $plpgsql$
begin
    if not pg_catalog.pg_has_role(current_user, 'ulak_admin', 'usage') then
        execute ulak_private.grant_command('ulak_admin', current_user);
    end if;
end
$plpgsql$;

-- help() shows these comments.
do $plpgsql$
declare
    v_routine text;
    v_comment text;
begin
    for v_routine, v_comment in
        select p.oid::pg_catalog.regprocedure, pg_catalog.obj_description(p.oid, 'pg_proc')
        from pg_catalog.pg_proc p
        where p.pronamespace = 'ulak'::pg_catalog.regnamespace and p.proname in (@left_out_names@)
    loop
        execute pg_catalog.format('comment on routine %s is %L', v_routine, v_comment || '; not here: it needs PL/Python');
    end loop;
end
$plpgsql$;

commit;

\set QUIET off

\echo ulak @version@ is installed without PL/Python: @left_out@ are left out, nodes deliver.
\echo Next: select * from ulak.start(0); then start a node.
