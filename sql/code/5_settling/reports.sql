-- What external workers report, as it is stored: errors on one line, without what they repeat of the message, and responses.

-- As it is stored. A worker may name the class itself, and it stays, whatever the reason repeats: it decides what becomes of the message.
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

-- A worker's reason without what it repeats of the message, or of a secret that its endpoint's config names: monitors and the log show it.
-- As the worker in the database hides it: texts and numbers of four characters and more, and nothing is left of a reason that quotes a piece
-- of a longer text.
create or replace function ulak_private.without_message(p_error text, p_id bigint)
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
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
            -- Keys that are data, not names of fields.
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

-- On one line, and cut where it gets too long, as the worker in the database writes errors: they are shown in every look, kept with
-- each failed cycle, and written to the server's log. What XML and terminals can't bear is left out, and so is what nobody sees: as
-- plpython/ulak/safety/text.py does it. Only UTF-8 numbers its characters so.
create or replace function ulak_private.error_line(p_error text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
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

-- What a worker reports is kept if it can be read: no longer as text than a payload, nor nested deeper. The work is done all the same, so
-- an error, and with it another attempt, would help nobody.
create or replace function ulak_private.kept_response(p_response jsonb)
returns jsonb
language plpgsql
stable
set search_path = pg_catalog, pg_temp
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
    -- Deeper than that, or beyond a gigabyte as text.
    when program_limit_exceeded then
        return '{"truncated": true}';
end
$plpgsql$;
