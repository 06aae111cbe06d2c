-- What a single value may be, wherever it comes from.

-- Texts. Without a search_path of their own these are inlined.

create or replace function ulak._has_control_characters(p_text text)
returns boolean
language sql
immutable
as $sql$
    select p_text ~ E'[\\x01-\\x1f\\x7f]'
$sql$;

create or replace function ulak._is_header_name(p_name text)
returns boolean
language sql
immutable
as $sql$
    select p_name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
$sql$;

-- By which headers are compared: WSGI and CGI hand x_api_key and X-Api-Key to an application under one name.
create or replace function ulak._header_key(p_name text)
returns text
language sql
immutable
as $sql$
    select translate(lower(p_name collate "C"), '_', '-')
$sql$;

-- Tabs may stand in it; a line break would begin another header.
create or replace function ulak._is_header_value(p_value text)
returns boolean
language sql
immutable
as $sql$
    select p_value !~ E'[\\x01-\\x08\\x0a-\\x1f\\x7f]'
$sql$;

-- Numbers and intervals: an error where one is out of its range.

create or replace function ulak._check_interval(p_name text, p_value interval, p_most interval)
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

create or replace function ulak._check_integer(p_name text, p_value integer, p_least integer, p_most integer default 2147483647)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_value is null or p_value not between p_least and p_most then
        raise exception '% must be between % and %, got %', p_name, p_least, p_most, coalesce(p_value::text, 'null')
            using errcode = '22023';
    end if;
end
$plpgsql$;

-- Messages a second. Slower than one a day, times run out of their range; NaN is above every number.
create or replace function ulak._check_rate(p_rate double precision)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_rate not between 1.0 / 86400 and 1000000 then
        raise exception 'the rate must be between one message a day and 1000000 a second'
            using errcode = '22023', detail = format('It is %s a second.', p_rate), hint = 'Leave it out for as fast as it goes.';
    end if;
end
$plpgsql$;

create or replace function ulak._check_bytes(p_what text, p_bytes bigint, p_most bigint)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_bytes > p_most then
        raise exception '% is larger than % bytes', p_what, p_most
            using errcode = '54000', detail = format('It has %s.', p_bytes);
    end if;
end
$plpgsql$;
