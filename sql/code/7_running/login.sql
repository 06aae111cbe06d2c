-- In its libpq mode pg_cron logs in as the role that a job runs as: whether it can.

-- Which line of which file keeps a role out, ulak-setup finds out.
create or replace function ulak_private.check_login()
returns table (item text, status text, detail text, fix text)
language sql
as $sql$
    select
        'login',
        case when l.problem is null then 'ok' else 'problem' end,
        case
            when l.problem is null then format('%s can log in', r.rolname)
            else format('%s can''t log in: %s', r.rolname, ulak_private.cut(regexp_replace(l.problem, '^.*FATAL: *', ''), 90))
        end,
        case
            when l.problem is null then null
            when r.rolcanlogin then ulak_private.setup_fix()
            else format('alter role %I login;', r.rolname)
        end
    from pg_class q
    join pg_roles r on r.oid in ('ulak_worker'::regrole, q.relowner)
    cross join lateral ulak_private.log_in(r.rolname) l(problem)
    where q.oid = 'ulak_private.deliveries'::regclass
        and ulak_private.is_pg_cron_loaded()
        and not ulak_private.has_background_workers()
    order by r.oid = q.relowner
$sql$;

-- Where pg_cron connects to. Only superusers may read its settings, and while it isn't loaded, they are anybody's.
create or replace function ulak_private.login_parameters()
returns table (host text, port text, database text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        case when ulak_private.is_pg_cron_loaded() then current_setting('cron.host') else 'localhost' end,
        current_setting('port'),
        current_database()::text
$sql$;

-- Tries the login that pg_cron makes: why it fails, or null.
create or replace function ulak_private.log_in(p_user text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.log_in(p_user)
$python$;
