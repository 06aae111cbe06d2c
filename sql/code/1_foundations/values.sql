-- Checks of single values, wherever they come from.

-- Texts.

create or replace function ulak_private.has_control_characters(p_text text)
returns boolean
language sql
immutable
as $sql$
    select p_text ~ E'[\\x01-\\x1f\\x7f]'
$sql$;

create or replace function ulak_private.is_header_name(p_name text)
returns boolean
language sql
immutable
as $sql$
    select p_name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
$sql$;

-- The form in which header names are compared: WSGI and CGI give x_api_key and X-Api-Key to an application under one name.
create or replace function ulak_private.header_key(p_name text)
returns text
language sql
immutable
as $sql$
    select translate(lower(p_name collate "C"), '_', '-')
$sql$;

-- Tabs are allowed; a line break would start another header.
create or replace function ulak_private.is_header_value(p_value text)
returns boolean
language sql
immutable
as $sql$
    select p_value !~ E'[\\x01-\\x08\\x0a-\\x1f\\x7f]'
$sql$;

-- Numbers and intervals: an error if one is out of range.

create or replace function ulak_private.check_interval(p_name text, p_value interval, p_most interval)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_value is null or p_value not between interval '0' and p_most then
        raise exception '% must be between 0 and %', p_name, p_most
            using errcode = '22023', detail = format('It is %s.', coalesce(p_value::text, 'null'));
    end if;
end
$plpgsql$;

create or replace function ulak_private.check_integer(p_name text, p_value integer, p_least integer, p_most integer default 2147483647)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_value is null or p_value not between p_least and p_most then
        raise exception '% must be between % and %, got %', p_name, p_least, p_most, coalesce(p_value::text, 'null')
            using errcode = '22023';
    end if;
end
$plpgsql$;

-- In messages per second. Below one a day, computed times would get out of range; NaN compares greater than every number.
create or replace function ulak_private.check_rate(p_rate double precision)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_rate not between 1.0 / 86400 and 1000000 then
        raise exception 'the rate must be between one message a day and 1000000 a second'
            using errcode = '22023', detail = format('It is %s a second.', p_rate), hint = 'Leave it out for no limit.';
    end if;
end
$plpgsql$;

create or replace function ulak_private.check_bytes(p_what text, p_bytes bigint, p_most bigint)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_bytes > p_most then
        raise exception '% is larger than % bytes', p_what, p_most
            using errcode = '54000', detail = format('It has %s.', p_bytes);
    end if;
end
$plpgsql$;

-- Payload filters: how ulak reads every jsonpath. A condition ($.total > 100) counts as its result, a path ($.items[*] ? (@.price > 10)) is
-- true if it finds anything. Returns a condition, for jsonb_path_match_tz(payload, filter, '{}', true): the other form raises when dates
-- with and without a zone meet, silent or not. A filter that can't be evaluated on a payload counts as false.
create or replace function ulak_private.condition(p_filter jsonpath, p_what text)
returns jsonpath
language plpgsql
stable
as $plpgsql$
declare
    -- With all quoted texts and keys emptied, only a variable, $"name", still looks like $"".
    v_bare text := regexp_replace(p_filter::text, E'"([^"\\\\]|\\\\.)*"', '""', 'g');
begin
    if v_bare ~ E'\\$""' then
        raise exception 'the % has a variable', p_what
            using errcode = '22023', hint = 'Write the value itself, such as $.total > 100.';
    elsif p_filter is null or ulak_private.is_condition(p_filter) then
        return p_filter;
    elsif v_bare !~ E'\\$' then
        raise exception 'the % says nothing about the payload', p_what
            using errcode = '22023', detail = format('It is %s.', p_filter), hint = 'Such as $.total > 100 or $.items[*] ? (@.price > 10).';
    end if;
    return regexp_replace(p_filter::text, '^(strict )?(.*)$', E'\\1exists(\\2)');
end
$plpgsql$;

-- A condition has one result, true, false or unknown, whatever it is applied to.
create or replace function ulak_private.is_condition(p_filter jsonpath)
returns boolean
language sql
stable
as $sql$
    select jsonb_path_query_array_tz('{}', p_filter, '{}', true) in ('[true]', '[false]', '[null]')
$sql$;

-- For calls without a preview: $.active is more likely to mean $.active == true than "active exists".
create or replace function ulak_private.require_condition(p_predicate jsonpath)
returns void
language plpgsql
stable
as $plpgsql$
declare
    v_condition jsonpath := ulak_private.condition(p_predicate, 'predicate');
begin
    if v_condition::text <> p_predicate::text then
        raise exception 'the predicate is a path, not a condition'
            using
                errcode = '22023',
                detail = format('It is %s.', p_predicate),
                hint = format('To test that there is something: %s. Otherwise compare it, such as $.total > 100 or $.active == true.', v_condition);
    end if;
end
$plpgsql$;
