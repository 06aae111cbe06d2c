-- The sweep: every ten seconds a worker looks for what nobody came for. Whatever crashed, rolled back or was skipped, nothing waits longer.

insert into ulak.sweep_state default values
on conflict (is_only) do nothing;

-- Every worker and node asks, and one does it.
create or replace function ulak._sweep()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak._try_lock('sweep') then
        perform ulak.recover_stale_messages(), ulak.mark_expired_messages(), ulak._unpark_orphans();
        perform ulak._forget_nodes();
    end if;
end
$plpgsql$;
