-- The installed version and kind. The plain script replaces both functions (sql/plain).

create or replace function ulak_private.version()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return e.extversion from pg_extension e where e.extname = 'ulak';
end
$plpgsql$;

-- Whether workers can run in this database; if not, only nodes deliver.
create or replace function ulak_private.has_python()
returns boolean
language sql
immutable
as $sql$
    select true
$sql$;
