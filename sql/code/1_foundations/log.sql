-- The server's log: one line per entry, whichever role causes it and however deep in other functions.

-- A line that functions write carries their calls and the statement of the session with it, which may be hundreds of lines. Only a
-- superuser may say otherwise, so this runs as the owner of the extension.
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

-- The same for what the session should see, too.
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
