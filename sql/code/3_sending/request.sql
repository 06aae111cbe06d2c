-- Options of a single message's request: a body that is sent byte for byte, a path appended to the endpoint's url, a time-out. They are
-- stored among the message's headers under names that no header can have: ":body", ":path" and ":timeout", like the pseudo-headers of
-- HTTP/2.

-- A raw body is stored as a JSON string, because jsonb would reformat it.
create or replace function ulak_private.body(p_payload jsonb, p_raw text)
returns jsonb
language plpgsql
immutable
as $plpgsql$
begin
    if p_raw is null then
        return p_payload;
    elsif p_payload is not null then
        raise exception 'a message has a payload or a raw body, not both'
            using errcode = '22023', hint = 'Leave p_payload out: select ulak.send(''my-endpoint'', p_raw => ''...'');';
    end if;
    return to_jsonb(p_raw);
end
$plpgsql$;

-- A message's headers with the options of its request. The options are checked here; the headers have been checked before.
create or replace function ulak_private.request_headers(
    p_endpoint_id bigint,
    p_headers jsonb,
    p_is_raw boolean,
    p_content_type text,
    p_path text,
    p_timeout double precision
)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_protocol text;
begin
    if num_nonnulls(p_path, p_timeout) > 0 then
        select e.protocol into v_protocol from ulak.endpoints e where e.id = p_endpoint_id;
        if v_protocol <> 'http' then
            raise exception 'a message for a % endpoint has no path and no time-out', v_protocol
                using errcode = '22023', hint = 'Leave them out, or put them into the headers for your own workers.';
        end if;
    end if;
    if p_content_type !~ E'^[!#$%&''*+.^_`|~0-9A-Za-z-]+/[!#$%&''*+.^_`|~0-9A-Za-z-]+( *;[\\x20-\\x7e]*)?$' or length(p_content_type) > 255 then
        raise exception 'content type "%" is not valid', left(p_content_type, 64)
            using errcode = '22023', hint = 'Such as application/xml or text/csv; charset=utf-8.';
    elsif p_timeout is not null and p_timeout not between 0.1 and 300 then
        raise exception 'the time-out must be between 0.1 and 300 seconds'
            using errcode = '22023',
                detail = format('It is %s.', p_timeout),
                hint = 'The endpoint''s own time-out is the upper bound; an administrator can raise it.';
    end if;
    if ulak_private.is_cloudevents_type(p_content_type) then
        perform ulak_private.check_credentials(p_endpoint_id, jsonb_build_object('content-type', p_content_type));
    end if;
    perform ulak_private.check_path(p_path);
    if p_path like '%?%' then
        perform ulak_private.check_parameters(p_endpoint_id, p_path);
    end if;
    return nullif(
        coalesce(p_headers, '{}')
        || jsonb_strip_nulls(
            jsonb_build_object(
                ':body', case when p_is_raw then 'raw' end,
                ':path', p_path,
                ':timeout', p_timeout::text,
                'content-type', p_content_type
            )
        ),
        '{}'
    );
end
$plpgsql$;

-- An appended path can't lead to another host, nor out of the endpoint's own path, even for receivers that decode it first, or twice, or
-- that take the text after a semicolon for a parameter of the segment. Decoding it again must not change it: no letter, digit, dot, hyphen
-- or underscore is encoded, and no %25 precedes two hexadecimal digits. Nor may it encode bytes that aren't UTF-8, or characters that some
-- receivers take for a dot or a slash.
create or replace function ulak_private.check_path(p_path text)
returns void
language plpgsql
immutable
as $plpgsql$
declare
    v_path text := lower(split_part(p_path, '?', 1) collate "C");
    v_once text := regexp_replace(v_path, '%(25)+', '%', 'g');
    v_decoded text := replace(replace(replace(replace(v_once, '%2e', '.'), '%2f', '/'), '%5c', '/'), '%3b', ';');
    v_problem text := case
        when p_path = '' or octet_length(p_path) > 2048 then 'must have 1 to 2048 bytes'
        when p_path !~ E'^[!$%&''()*+,./0-9:;=?@A-Z_a-z~-]+$'
            then 'must be percent-encoded: no spaces, control characters, backslashes, fragments, nor characters beyond ASCII'
        when p_path ~ '%(?![0-9A-Fa-f]{2})' then 'has a % that is not followed by two hexadecimal digits'
        when p_path ~ '%(0[0-9A-Fa-f]|1[0-9A-Fa-f]|7[Ff])' then 'must not have control characters'
        when p_path ~ '^[A-Za-z][A-Za-z0-9+.-]*:' or p_path ~ '^//' then 'must not have a scheme or a host'
        when v_decoded ~ E'(^|/)\\.{1,2}(;[^/]*)?(/|$)' then 'must not have the segments . and ..'
        when v_path ~ '%(2d|2e|5f|3[0-9]|4[1-9a-f]|5[0-9a]|6[1-9a-f]|7[0-9a])'
            then 'must not have letters, digits, or - . _ percent-encoded'
        when v_path ~ '%25[0-9a-f]{2}' then 'must not be percent-encoded twice'
        when v_path ~ '%(c[01]|e0%[89]|f0%8|f[5-9a-f]|ef%bc%(8e|8f|bc)|e2%(80%a4|81%84|88%95))'
            then 'must be percent-encoded UTF-8, without characters that pass for a dot or a slash'
    end;
begin
    if v_problem is not null then
        raise exception 'the path %', v_problem
            using errcode = '22023', hint = 'Such as orders/5 or /orders/5?notify=true; it is appended to the endpoint''s url.';
    end if;
end
$plpgsql$;

-- A message must not replace a parameter of the endpoint's own url, which is often a credential. Under SigV4 it must not add a parameter
-- that tells the service what to do in the endpoint's name. A parameter whose name is encoded might be any of them.
create or replace function ulak_private.check_parameters(p_endpoint_id bigint, p_path text)
returns void
language plpgsql
stable
as $plpgsql$
declare
    v_url text;
    v_is_sigv4 boolean;
    v_name text;
begin
    select coalesce(s.value, e.config ->> 'url'), e.config #>> '{auth,type}' = 'aws_sigv4' into v_url, v_is_sigv4
    from ulak.endpoints e
    left join ulak_private.secrets s on s.name = e.config #>> '{url,$secret}'
    where e.id = p_endpoint_id;
    select m.name into v_name
    from ulak_private.parameter_names(p_path) m
    where exists (select from ulak_private.parameter_names(v_url) o where o.name = m.name or m.name ~ '[%+]')
        or v_is_sigv4 and m.name ~ '^x[-_]amz[-_]|^action$|[%+]'
    limit 1;
    if found then
        raise exception 'parameter "%" is set by the endpoint', left(v_name, 64)
            using errcode = '42501',
                detail = 'A message can''t replace a parameter of its endpoint''s url, nor have one whose name is encoded beside them. '
                    || 'With auth "aws_sigv4" it can''t have x-amz-* or action, nor one whose name is encoded.',
                hint = 'Leave it out, or have an administrator put it into the endpoint''s url.';
    end if;
end
$plpgsql$;

-- The parameter names in the query of a url, in lower case. Some receivers separate parameters by semicolons.
create or replace function ulak_private.parameter_names(p_url text)
returns table (name text)
language sql
immutable
as $sql$
    select lower(split_part(p.parameter, '=', 1) collate "C")
    from regexp_split_to_table(substring(split_part(p_url, '#', 1) from E'\\?(.*)$'), E'[&;?]') p (parameter)
    where p.parameter <> ''
$sql$;

-- A message's headers with two options that don't affect its request. They are kept there until the message is stored: then ":generation"
-- becomes a column of its delivery, ":max_retries" one of its event.
create or replace function ulak_private.with_options(p_headers jsonb, p_generation bigint, p_max_retries integer)
returns jsonb
language plpgsql
immutable
as $plpgsql$
begin
    if p_generation is not null then
        perform ulak_private.check_generation(p_generation);
        p_headers := coalesce(p_headers, '{}') || jsonb_build_object(':generation', p_generation);
    end if;
    if p_max_retries is not null then
        if p_max_retries not between 0 and 1000 then
            raise exception 'max_retries must be between 0 and 1000'
                using errcode = '22023',
                    detail = format('It is %s.', p_max_retries),
                    hint = 'Leave it out to use the endpoint''s retry policy.';
        end if;
        p_headers := coalesce(p_headers, '{}') || jsonb_build_object(':max_retries', p_max_retries);
    end if;
    return p_headers;
end
$plpgsql$;

create or replace function ulak_private.check_generation(p_generation bigint)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_generation < 1 then
        raise exception 'a generation is a number from 1 on'
            using errcode = '22023', detail = format('It is %s.', p_generation);
    end if;
end
$plpgsql$;

-- The generation of messages that are sent without one.
create or replace function ulak_private.generation()
returns bigint
language plpgsql
stable
as $plpgsql$
begin
    return (select nullif(v.value::bigint, 0) from ulak.setting_values v where v.name operator(pg_catalog.=) 'generation');
end
$plpgsql$;
