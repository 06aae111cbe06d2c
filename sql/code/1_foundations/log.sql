-- The server's log: one line per entry, whichever role causes it, and however deeply the calls are nested.

-- By default, PostgreSQL adds the call stack and the session's statement to a line that a function logs, which may be hundreds of lines.
-- Only a superuser may change that, so this runs as the owner of the extension.
create or replace function ulak_private.log(p_line text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set log_error_verbosity = 'terse'
set log_min_error_statement = 'panic'
as $plpgsql$
begin
    raise log '%', p_line;
end
$plpgsql$;

-- The same for lines that the session should see, too.
create or replace function ulak_private.warn(p_line text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set log_error_verbosity = 'terse'
set log_min_error_statement = 'panic'
as $plpgsql$
begin
    raise warning '%', p_line;
end
$plpgsql$;
