-- Time as callers give it. Whatever is computed from it later stays within what PostgreSQL and every client can hold.

-- Infinite times can't be subtracted, and years of five digits can't be read by Python, Java's ISO format and others. There is room
-- behind the range for any interval that a function of ulak adds.
create or replace function ulak._is_sane_time(p_time timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_time operator(pg_catalog.>=) timestamptz '1970-01-01 00:00:00+00'
        and p_time operator(pg_catalog.<) timestamptz '9000-01-01 00:00:00+00'
$sql$;

-- The time that a public function goes by: p_now, or the server's own if it is null.
create or replace function ulak._clock(p_now timestamptz)
returns timestamptz
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak._is_sane_time(p_now) then
        raise exception 'p_now must be a time between the years 1970 and 9000'
            using errcode = '22023', detail = format('It is %s.', p_now), hint = 'Leave it out to go by the server''s clock.';
    end if;
    return coalesce(p_now, clock_timestamp());
end
$plpgsql$;

-- An interval as an exact number of seconds: to a timestamptz, '1 day' may add 23 or 25 hours, as the session's time zone
-- has it. Null stays null.
create or replace function ulak._exact(p_interval interval)
returns interval
language sql
immutable
as $sql$
    select pg_catalog.make_interval(secs => pg_catalog.date_part('epoch', p_interval))
$sql$;

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
