-- ulak.top: the worst endpoints at a glance, for \watch; ulak.top(n): as many as asked for.

create or replace function ulak.top(p_limit integer default 50, p_now timestamptz default clock_timestamp())
returns table (
    endpoint text,
    state text,
    waiting text,
    oldest_wait text,
    in_flight bigint,
    per_second numeric,
    failed_percent numeric,
    p50 text,
    p95 text,
    breaker text,
    last_hour text,
    last_error text,
    last_failed text,
    slowest text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.finite_time(p_now);
    perform ulak_private.check_integer('p_limit', p_limit, 1);
    return query
    select
        f.name,
        ulak_private.state_glyph(f.state) || ' ' || f.state,
        case
            when not f.is_estimate then lpad(ulak_private.thousands(f.waiting), 10)
            when f.sampled_at is null then lpad('>' || ulak_private.thousands(f.waiting - 1), 10)
            else format('%10s, %s ago', '~' || ulak_private.thousands(f.waiting), ulak_private.short_duration(p_now - f.sampled_at))
        end,
        lpad(coalesce(ulak_private.short_duration(p_now - f.waiting_since), ''), 7),
        f.in_flight,
        round(f.per_second::numeric, 1),
        round(f.failed_percent::numeric, 1),
        lpad(coalesce(ulak_private.short_duration(make_interval(secs => h.p50_ms / 1000)), ''), 6),
        lpad(coalesce(ulak_private.short_duration(make_interval(secs => h.p95_ms / 1000)), ''), 6),
        case f.circuit_state
            when 'open' then 'open, ' || case
                when f.next_probe_at <= p_now then 'probe due'
                else 'probe in ' || ulak_private.short_duration(f.next_probe_at - p_now)
            end
            when 'half_open' then 'probing'
            else case when f.circuit_failure_count > 0 then format('closed, %s failed', f.circuit_failure_count) else 'closed' end
        end,
        -- Attempts, whatever became of them: an endpoint that answers nothing but errors isn't a quiet one.
        ulak_private.sparkline(array(
            select n.delivered + n.failed from unnest(h.last_hour, h.last_hour_failed) with ordinality n (delivered, failed, place) order by n.place
        )),
        case
            when length(f.last_error) > 40 then left(f.last_error, 39) || ulak_private.sign(8230, '~')
            else f.last_error
        end,
        format('%10s', ulak_private.short_duration(p_now - f.last_failure_at) || ' ago'),
        lpad(coalesce(ulak_private.short_duration(make_interval(secs => h.max_ms / 1000)), ''), 6)
    from ulak_private.endpoint_health(array(select f from ulak_private.endpoint_facts(null, p_now) f), p_limit, p_now) h
    cross join lateral (select (h.fact).*) f
    order by h.place;
end
$plpgsql$;

comment on function ulak.top(integer, timestamptz) is
    'the p_limit worst endpoints (default 50), the worst first, with the columns of the view ulak.top';

create or replace view ulak.top as
select t.*
from ulak.top() t;

comment on view ulak.top is E'the worst 50 endpoints at a glance; in psql: select * from ulak.top \\watch 2. More of them: select * from ulak.top(500)';
comment on column ulak.top.endpoint is 'name of the endpoint';
comment on column ulak.top.state is 'flowing, idle, sending (requests are under way, none has succeeded in the last minute), failing (5% or more), late (due for over a minute), half_open, open or disabled, each with its own sign';
comment on column ulak.top.waiting is 'messages that wait; ~: counted some time ago; >: there are more';
comment on column ulak.top.oldest_wait is 'how long the oldest message has waited since it was first due, its retries included';
comment on column ulak.top.in_flight is 'messages that a worker holds';
comment on column ulak.top.per_second is 'deliveries per second in the last minute (http endpoints)';
comment on column ulak.top.failed_percent is 'share of attempts that failed in the last five minutes';
comment on column ulak.top.p50 is 'half of the requests of the last five minutes took less';
comment on column ulak.top.p95 is '95% of the requests of the last five minutes took less';
comment on column ulak.top.breaker is 'state of the circuit breaker, and when an open one sends its next probe';
comment on column ulak.top.last_hour is 'attempts of the last hour, delivered and failed, three minutes per sign';
comment on column ulak.top.last_error is 'last failure, cut at 40 characters';
comment on column ulak.top.last_failed is 'when that was';
comment on column ulak.top.slowest is 'the longest request of the last five minutes';

-- A character by its number in Unicode, or what stands for it in a database that can't hold it.
create or replace function ulak_private.sign(p_number integer, p_plain text)
returns text
language plpgsql
stable
as $plpgsql$
begin
    if getdatabaseencoding() = 'UTF8' then
        return chr(p_number);
    end if;
    return p_plain;
end
$plpgsql$;

create or replace function ulak_private.state_glyph(p_state text)
returns text
language sql
stable
as $sql$
    select case p_state
        when 'flowing' then ulak_private.sign(9679, '*')
        when 'idle' then ulak_private.sign(183, '-')
        when 'sending' then ulak_private.sign(9654, '>')
        when 'half_open' then ulak_private.sign(9680, '%')
        when 'open' then ulak_private.sign(9675, 'o')
        when 'disabled' then ulak_private.sign(9632, '#')
        else ulak_private.sign(9650, '^')
    end
$sql$;

create or replace function ulak_private.thousands(p_number numeric)
returns text
language sql
immutable
as $sql$
    select to_char(p_number, 'FM999,999,999,990')
$sql$;

-- The two largest units: 850ms, 12.3s, 3m 12s, 5h 2m, 4d 7h.
create or replace function ulak_private.short_duration(p_interval interval)
returns text
language plpgsql
immutable
as $plpgsql$
declare
    v_seconds numeric := extract(epoch from p_interval);
begin
    if v_seconds is null then
        return null;
    end if;
    v_seconds := greatest(v_seconds, 0);
    return case
        when v_seconds < 0.01 then to_char(v_seconds * 1000, 'FM990.0') || 'ms'
        when v_seconds < 1 then round(v_seconds * 1000) || 'ms'
        when v_seconds < 60 then to_char(trunc(v_seconds, 1), 'FM990.0') || 's'
        when v_seconds < 3600 then format('%sm %ss', div(v_seconds, 60), floor(v_seconds % 60))
        when v_seconds < 86400 then format('%sh %sm', div(v_seconds, 3600), div(v_seconds % 3600, 60))
        else format('%sd %sh', div(v_seconds, 86400), div(v_seconds % 86400, 3600))
    end;
end
$plpgsql$;

-- A dot is none at all; the lowest bar is at least one.
create or replace function ulak_private.sparkline(p_values bigint[])
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_line text := '';
    v_value bigint;
    v_most bigint := 0;
    v_height integer;
begin
    foreach v_value in array coalesce(p_values, '{}') loop
        v_most := greatest(v_most, v_value);
    end loop;
    foreach v_value in array coalesce(p_values, '{}') loop
        v_height := case when v_value > 0 then least(7, 8 * v_value / v_most) end;
        -- From the lowest block to the full one.
        v_line := v_line || case
            when v_height is null then ulak_private.sign(183, '-')
            else ulak_private.sign(9601 + v_height, (v_height + 1)::text)
        end;
    end loop;
    return v_line;
end
$plpgsql$;
