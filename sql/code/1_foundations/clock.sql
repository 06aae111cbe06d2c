-- The clock. Functions take their time as p_now, so that tests move time instead of waiting for it; an operator's
-- clock decides what is due, expired, deleted and dropped, so nobody below an administrator may bring one. Whatever is
-- computed from a time that was given stays within what PostgreSQL and every client can hold.

-- Infinite times can't be subtracted, and years of five digits can't be read by Python, Java's ISO format and others. There is room
-- behind the range for any interval that a function of ulak adds.
create or replace function ulak_private.is_sane_time(p_time timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_time operator(pg_catalog.>=) timestamptz '1970-01-01 00:00:00+00'
        and p_time operator(pg_catalog.<) timestamptz '9000-01-01 00:00:00+00'
$sql$;

-- The time that a call goes by: an administrator's p_now as it is, everybody else's only if it is the time of the call (the
-- default, or one of our own functions that passes it on), and then it is read once more.
create or replace function ulak_private.clock(p_now timestamptz)
returns timestamptz
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_now timestamptz := clock_timestamp();
begin
    if p_now is null then
        return v_now;
    elsif not ulak_private.is_sane_time(p_now) then
        perform ulak_private.finite_time(p_now);
    elsif ulak_private.caller_has('ulak_admin') then
        return p_now;
    elsif p_now not between v_now - interval '1 minute' and v_now + interval '1 minute' then
        raise exception 'only an administrator may set p_now'
            using
                errcode = '42501',
                detail = format('p_now is %s, the clock says %s.', p_now, v_now),
                hint = 'Leave p_now out.';
    end if;
    return v_now;
end
$plpgsql$;

-- For looks that change nothing: anybody may ask how things stood, or will stand, at a time that exists.
create or replace function ulak_private.finite_time(p_now timestamptz)
returns timestamptz
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak_private.is_sane_time(p_now) then
        raise exception 'p_now must be a time between the years 1970 and 9000'
            using errcode = '22023', detail = format('It is %s.', p_now), hint = 'Leave it out to use the server''s clock.';
    end if;
    return coalesce(p_now, clock_timestamp());
end
$plpgsql$;

-- Whether a time was written by a clock that was set back since: no state may be dated further ahead than its own delay allows. A second
-- is no sign of it, since sessions read the clock a moment apart.
create or replace function ulak_private.is_ahead(p_time timestamptz, p_now timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_time operator(pg_catalog.-) p_now operator(pg_catalog.>) interval '1 second'
$sql$;

-- The time of an entry of ulak.event_log: actors must not be able to date it. A superuser could write the table anyway.
create or replace function ulak_private.log_time(p_now timestamptz)
returns timestamptz
language sql
volatile
set search_path = pg_catalog, pg_temp
as $sql$
    select case when current_setting('is_superuser') = 'on' then p_now else clock_timestamp() end
$sql$;

-- An interval as an exact number of seconds: to a timestamptz, '1 day' may add 23 or 25 hours, as the session's time zone
-- has it. Null stays null.
create or replace function ulak_private.exact(p_interval interval)
returns interval
language sql
immutable
as $sql$
    select pg_catalog.make_interval(secs => pg_catalog.date_part('epoch', p_interval))
$sql$;
