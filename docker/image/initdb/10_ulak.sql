-- Runs once, in the database of POSTGRES_DB, when the container's cluster is made.

create extension pg_cron;
create extension ulak cascade;

-- pg_cron's scheduler gave up when the server started, if its database wasn't there yet; it tries again after a second.
do $plpgsql$
begin
    for i in 1..100 loop
        perform pg_catalog.pg_stat_clear_snapshot();
        exit when exists (select from pg_catalog.pg_stat_activity a where a.backend_type = 'pg_cron launcher');
        perform pg_catalog.pg_sleep(0.1);
    end loop;
end
$plpgsql$;

-- As many workers as the setting says, and the maintenance, run by pg_cron. A container that can't deliver had better not start.
do $plpgsql$
declare
    v_item record;
begin
    for v_item in select * from ulak.start() loop
        raise notice '%: %, %', v_item.item, v_item.status, v_item.detail;
        if v_item.status = 'problem' then
            raise exception '%: %', v_item.item, v_item.detail using hint = v_item.fix;
        end if;
    end loop;
end
$plpgsql$;
