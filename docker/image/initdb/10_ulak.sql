-- Runs once, in the database of POSTGRES_DB, when the container's cluster is made.

create extension pg_cron;
create extension ulak cascade;

-- pg_cron's scheduler gives up at the server's start if its database isn't there yet, and tries again after a second.
do $plpgsql$
begin
    for i in 1..100 loop
        perform pg_catalog.pg_stat_clear_snapshot();
        exit when exists (select from pg_catalog.pg_stat_activity a where a.backend_type = 'pg_cron launcher');
        perform pg_catalog.pg_sleep(0.1);
    end loop;
end
$plpgsql$;

-- pg_cron runs as many workers as the setting says, and the maintenance. A container that can't deliver doesn't start.
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
