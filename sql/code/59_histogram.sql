-- Histograms of latency: element 1 counts what took less than 1 ms, element i what took from 2^(i-2) to 2^(i-1) ms. What is
-- missing at the end is 0.

create or replace function ulak._add_histograms(p_sum bigint[], p_more bigint[])
returns bigint[]
language plpgsql
immutable
as $plpgsql$
begin
    for i in 1..coalesce(cardinality(p_more), 0) loop
        p_sum[i] := coalesce(p_sum[i], 0) + coalesce(p_more[i], 0);
    end loop;
    return p_sum;
end
$plpgsql$;

create or replace aggregate ulak._sum_histograms(p_histogram bigint[]) (
    sfunc = ulak._add_histograms,
    stype = bigint[],
    initcond = '{}'
);

-- For each fraction, in ascending order, the time that so many took at most; null if there were none. Within an element the times
-- are taken to be spread evenly.
create or replace function ulak._percentiles(p_histogram bigint[], p_fractions double precision[])
returns double precision[]
language plpgsql
immutable
as $plpgsql$
declare
    v_count bigint;
    v_all bigint := 0;
    v_below bigint := 0;
    v_from double precision := 0;
    v_until double precision := 1;
    v_found double precision[] := '{}';
    v_next integer := 1;
begin
    foreach v_count in array coalesce(p_histogram, '{}') loop
        v_all := v_all + coalesce(v_count, 0);
    end loop;
    if v_all = 0 then
        return v_found;
    end if;
    foreach v_count in array p_histogram loop
        while v_count > 0 and v_below + v_count >= p_fractions[v_next] * v_all loop
            v_found[v_next] := v_from + (v_until - v_from) * (p_fractions[v_next] * v_all - v_below) / v_count;
            v_next := v_next + 1;
        end loop;
        exit when v_next > cardinality(p_fractions);
        v_below := v_below + coalesce(v_count, 0);
        v_from := v_until;
        v_until := v_until * 2;
    end loop;
    return v_found;
end
$plpgsql$;
