-- Fixes to paste into psql: SQL, or a comment that says what to do elsewhere. What is wrong in the server's files, ulak-setup mends.

-- The line for root's shell that puts the server right. The name of a database may be anybody's, so whatever a shell could misread is quoted,
-- and what would end the comment is replaced: ulak-setup refuses such names anyway.
create or replace function ulak_private.setup_fix(p_workers integer default null)
returns text
language sql
stable
as $sql$
    select '-- as root on the server: ulak-setup ' || string_agg(
        case
            when w.word ~ '^[A-Za-z0-9_./:@%+-]+$' then w.word
            else '''' || replace(regexp_replace(w.word, '[[:cntrl:]]', '?', 'g'), '''', E'''\\''''') || ''''
        end,
        ' ' order by w.place
    )
    from regexp_match(current_setting('config_file'), '^/etc/postgresql/([^/]+)/([^/]+)/postgresql[.]conf$') debians (place)
    cross join lateral unnest(
        coalesce(debians.place, array['--data', current_setting('data_directory')])
            || current_database()::text
            || case when p_workers <> ulak_private.default_workers() then array['--workers', p_workers::text] end
    ) with ordinality w(word, place)
$sql$;

-- A parameter of the server that needs no restart. ALTER SYSTEM has to be alone where \gexec runs it.
create or replace function ulak_private.parameter_fix(p_parameter text)
returns text
language sql
immutable
as $sql$
    select format('alter system set %s; -- then: select pg_reload_conf();', p_parameter)
$sql$;

create or replace function ulak_private.package_fix(p_package text)
returns text
language sql
immutable
as $sql$
    select '-- as root on the server: apt-get install ' || p_package
$sql$;

-- Makes one line of a text, and cuts it.
create or replace function ulak_private.cut(p_text text, p_length integer)
returns text
language sql
immutable
as $sql$
    select case when length(t.line) > p_length then left(t.line, p_length - 3) || '...' else t.line end
    from (select regexp_replace(p_text, E'\\s+', ' ', 'g')) t (line)
$sql$;
