-- The clock. Functions take the time as p_now, so that tests move time instead of waiting for it. The time decides what is due, expired,
-- deleted and dropped, so only administrators may pass another one. Times that are computed from it stay within what PostgreSQL and every
-- client can hold.

-- Infinite times can't be subtracted, and Python, Java's ISO format and others can't read five-digit years. Any interval that ulak adds to
-- a time within this range still gives a valid time.
create or replace function ulak_private.is_sane_time(p_time timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_time operator(pg_catalog.>=) timestamptz '1970-01-01 00:00:00+00'
        and p_time operator(pg_catalog.<) timestamptz '9000-01-01 00:00:00+00'
$sql$;

-- The time that a call uses: an administrator's p_now as it is. Everybody else's p_now must be within a minute of the clock (the default,
-- or passed on by one of our own functions), and the clock is used instead.
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

-- For functions that only read: everybody may ask how things stood, or will stand, at any time within the range.
create or replace function ulak_private.finite_time(p_now timestamptz)
returns timestamptz
language plpgsql
volatile
as $plpgsql$
begin
    if not ulak_private.is_sane_time(p_now) then
        raise exception 'p_now must be a time between the years 1970 and 9000'
            using errcode = '22023', detail = format('It is %s.', p_now), hint = 'Leave it out to use the server''s clock.';
    end if;
    return coalesce(p_now, clock_timestamp());
end
$plpgsql$;

-- Whether a time was written before the clock was set back: no state may be dated further ahead than its own delay allows. Up to a second
-- doesn't count, since sessions read the clock a moment apart.
create or replace function ulak_private.is_ahead(p_time timestamptz, p_now timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_time operator(pg_catalog.-) p_now operator(pg_catalog.>) interval '1 second'
$sql$;

-- The time of an entry of ulak.event_log: callers must not be able to choose it. Superusers may, since they could write the table anyway.
create or replace function ulak_private.log_time(p_now timestamptz)
returns timestamptz
language sql
volatile
as $sql$
    select case when current_setting('is_superuser') = 'on' then p_now else clock_timestamp() end
$sql$;

-- An interval as an exact number of seconds: added to a timestamptz, '1 day' may be 23 or 25 hours, depending on the session's time zone.
-- Null stays null.
create or replace function ulak_private.exact(p_interval interval)
returns interval
language sql
immutable
as $sql$
    select pg_catalog.make_interval(secs => pg_catalog.date_part('epoch', p_interval))
$sql$;
