-- External workers' reports as they are stored: responses, and errors on one line.

-- A worker's reason in its own words, but for the secrets that configs name. If the worker names the class itself, the class is always
-- kept, because it decides what happens to the message. Secrets are masked before the line is cut: the cut may go through one.
create or replace function ulak_private.reported_error(p_error text, p_secrets text[])
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_class text := coalesce(substring(p_error from E'^\\[(RETRYABLE|PERMANENT|DISABLE)\\]'), 'RETRYABLE');
    v_reason text := regexp_replace(p_error, E'^\\[(RETRYABLE|PERMANENT|DISABLE)\\]\\s*', '');
    v_secret text;
begin
    foreach v_secret in array p_secrets loop
        v_reason := regexp_replace(v_reason, '***=' || v_secret, '****', 'gi');
    end loop;
    return format('[%s] %s', v_class, coalesce(nullif(ulak_private.error_line(v_reason), ''), 'no reason given'));
end
$plpgsql$;

-- The secrets that the configs of these messages' endpoints name, the longest first. Shorter ones protect nothing (see
-- plpython/ulak/safety/mask.py).
create or replace function ulak_private.secrets_of(p_ids bigint[])
returns text[]
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
as $sql$
    select array(
        select s.value
        from ulak.endpoints e
        cross join lateral jsonb_each_text(ulak_private.secret_values(ulak_private.secret_names(e.config))) s
        where e.id in (select q.endpoint_id from unnest(p_ids) r(id) join ulak_private.deliveries q on q.id between r.id and r.id)
            and length(s.value) >= 4
        order by length(s.value) desc
    )
$sql$;

-- An error on one line and cut to length, like those of the worker in the database: monitors read it, and every failed cycle keeps it.
-- Invisible characters, and those that XML or terminals can't handle, become spaces, as in
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
