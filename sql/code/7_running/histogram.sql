-- Histograms of latency: element 1 counts requests of less than 1 ms, element 1 + i those from 2^((i-1)/4) to 2^(i/4) ms, and element 86
-- the rest. Arrays begin and end with elements that aren't 0.

create or replace function ulak_private.add_histograms(p_sum bigint[], p_more bigint[])
returns bigint[]
language plpgsql
immutable
as $plpgsql$
begin
    if cardinality(p_sum) = 0 then
        return p_more;
    end if;
    for i in coalesce(array_lower(p_more, 1), 1)..coalesce(array_upper(p_more, 1), 0) loop
        p_sum[i] := coalesce(p_sum[i], 0) + coalesce(p_more[i], 0);
    end loop;
    return p_sum;
end
$plpgsql$;

create or replace aggregate ulak_private.sum_histograms(p_histogram bigint[]) (
    sfunc = ulak_private.add_histograms,
    stype = bigint[],
    initcond = '{}'
);

-- The percentiles for the given fractions, in ascending order; none without requests. Times are taken to be spread evenly within an element,
-- and never above the longest time measured, if it is known.
create or replace function ulak_private.percentiles(
    p_histogram bigint[],
    p_fractions double precision[],
    p_max_ms double precision default null
)
returns double precision[]
language plpgsql
immutable
as $plpgsql$
declare
    v_count bigint;
    v_all bigint := 0;
    v_below bigint := 0;
    v_from double precision;
    v_until double precision;
    v_found double precision[] := '{}';
    v_next integer := 1;
begin
    foreach v_count in array coalesce(p_histogram, '{}') loop
        v_all := v_all + coalesce(v_count, 0);
    end loop;
    if v_all = 0 then
        return v_found;
    end if;
    for i in array_lower(p_histogram, 1)..array_upper(p_histogram, 1) loop
        v_count := p_histogram[i];
        if v_count > 0 then
            v_from := case when i = 1 then 0 else 2 ^ ((i - 2) / 4.0::double precision) end;
            v_until := 2 ^ ((i - 1) / 4.0::double precision);
            while v_below + v_count >= p_fractions[v_next] * v_all loop
                v_found[v_next] := least(
                    v_from + (v_until - v_from) * (p_fractions[v_next] * v_all - v_below) / v_count, p_max_ms
                );
                v_next := v_next + 1;
            end loop;
            exit when v_next > cardinality(p_fractions);
            v_below := v_below + v_count;
        end if;
    end loop;
    return v_found;
end
$plpgsql$;
