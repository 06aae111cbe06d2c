-- External workers' reports as they are stored: responses, and errors on one line, without anything quoted from the message.

-- The error as it is stored. If the worker names the class itself, the class is always kept, because it decides what happens to the message.
create or replace function ulak_private.reported_error(p_error text, p_id bigint)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_class text := coalesce(substring(p_error from E'^\\[(RETRYABLE|PERMANENT|DISABLE)\\]'), 'RETRYABLE');
    v_reason text := regexp_replace(p_error, E'^\\[(RETRYABLE|PERMANENT|DISABLE)\\]\\s*', '');
begin
    return format(
        '[%s] %s', v_class, coalesce(nullif(ulak_private.error_line(ulak_private.without_message(v_reason, p_id)), ''), 'no reason given')
    );
end
$plpgsql$;

-- A worker's reason without quotes from the message or from a secret that its endpoint's config names, because monitors and the log show it.
-- The rules are those of the worker in the database: texts and numbers of at least four characters are hidden, and a reason that quotes a
-- piece of a longer text is dropped altogether.
create or replace function ulak_private.without_message(p_error text, p_id bigint)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_reason text := left(p_error, 4000);
    v_lower text := lower(v_reason collate "C");
    v_message record;
    v_sent text[];
    v_value text;
begin
    select q.payload, q.headers, e.config into v_message
    from ulak.queue q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = p_id;
    if v_reason is null or not found then
        return v_reason;
    elsif pg_column_size(v_message.payload) > 1048576 then
        return 'the reason is left out: the payload is too large to be searched for in it';
    end if;
    v_sent := array(
        select distinct lower(s.value collate "C")
        from (
            select v #>> '{}'
            from jsonb_path_query(jsonb_build_array(v_message.payload, v_message.headers), 'strict $.**') v
            where jsonb_typeof(v) in ('string', 'number')
            union all
            -- Keys that look like data rather than field names.
            select k #>> '{}'
            from jsonb_path_query(v_message.payload, 'strict $.** ? (@.type() == "object").keyvalue().key') k
            where k #>> '{}' !~ '^[A-Za-z_$][A-Za-z_.$-]*$'
            union all
            select v.value
            from jsonb_each_text(ulak_private.secret_values(ulak_private.secret_names(v_message.config))) v
        ) s(value)
        where length(s.value) >= 4
    );
    for v_value in select s from unnest(v_sent) s where strpos(v_lower, s) > 0 order by length(s) desc loop
        v_reason := regexp_replace(v_reason, '***=' || v_value, '****', 'gi');
    end loop;
    v_lower := lower(v_reason collate "C");
    if exists (
        select
        from generate_series(1, length(v_lower) - 11, 12) w(place)
        cross join unnest(v_sent) s(value)
        where length(s.value) >= 12 and strpos(s.value, substr(v_lower, w.place, 12)) > 0
    ) then
        return 'the reason is left out: it repeats the payload';
    end if;
    return v_reason;
end
$plpgsql$;

-- An error on one line and cut to length, like those of the worker in the database: monitors show it, every failed cycle keeps it, and
-- the server's log gets it. Invisible characters, and those that XML or terminals can't handle, become spaces, as in
-- plpython/ulak/safety/text.py. Their code points are known only in UTF-8.
create or replace function ulak_private.error_line(p_error text)
returns text
language sql
stable
as $sql$
    select case when length(e.line) > 1000 then left(e.line, 1000) || '...' else e.line end
    from (
        select regexp_replace(
            left(p_error, 4000),
            case
                when getdatabaseencoding() <> 'UTF8' then E'[\\x01-\\x1f\\x7f]+'
                else E'[\\u0001-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufdd0-\\ufdef\\ufeff\\ufff9-\\ufffb'
                    || (
                        select string_agg(format(E'\\U%s-\\U%s', lpad(to_hex(p * 65536 + 65534), 8, '0'), lpad(to_hex(p * 65536 + 65535), 8, '0')), '')
                        from generate_series(0, 16) p
                    )
                    || E'\\U000e0000-\\U000e007f]+'
            end,
            ' ',
            'g'
        )
    ) e (line)
$sql$;

create or replace function ulak_private.without_class(p_error text)
returns text
language sql
immutable
as $sql$
    select regexp_replace(p_error, E'^\\[(RETRYABLE|PERMANENT)\\]\\s*', '')
$sql$;

-- A response is kept if it can be read: as text no longer than a payload may be, and not nested deeper. The work is done in any case, so
-- raising an error, and thereby causing another attempt, would help nobody.
create or replace function ulak_private.kept_response(p_response jsonb)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_limit integer;
begin
    if p_response is null then
        return null;
    end if;
    v_limit := ulak.setting('max_payload_size')::integer;
    if pg_column_size(p_response) <= v_limit and octet_length(p_response::text) <= v_limit then
        perform ulak_private.check_depth('response', array[p_response]);
        return p_response;
    end if;
    return '{"truncated": true}';
exception
    -- The response is nested too deeply, or longer than a gigabyte as text.
    when program_limit_exceeded then
        return '{"truncated": true}';
end
$plpgsql$;
