-- Histograms of latency: element 100 + i counts requests from 2^((i-1)/4) to 2^(i/4) ms, element 100 those of less than 1 ms, and
-- element 185 the rest. Arrays begin and end with elements that aren't 0. Version 0.1.0 used powers of two: its element 1 counts requests
-- of less than 1 ms, element i those from 2^(i-2) to 2^(i-1) ms. Its elements 1 to 22 are kept beside the others.

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
    v_histogram bigint[] := p_histogram;
    v_count bigint;
    v_all bigint := 0;
    v_below bigint := 0;
    v_from double precision;
    v_until double precision;
    v_found double precision[] := '{}';
    v_next integer := 1;
begin
    if array_lower(v_histogram, 1) < 100 then
        v_histogram := ulak_private.fine_histogram(v_histogram);
    end if;
    foreach v_count in array coalesce(v_histogram, '{}') loop
        v_all := v_all + coalesce(v_count, 0);
    end loop;
    if v_all = 0 then
        return v_found;
    end if;
    for i in array_lower(v_histogram, 1)..array_upper(v_histogram, 1) loop
        v_count := v_histogram[i];
        if v_count > 0 then
            v_from := case when i = 100 then 0 else 2 ^ ((i - 101) / 4.0::double precision) end;
            v_until := 2 ^ ((i - 100) / 4.0::double precision);
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

-- Converts the elements of a histogram that 0.1.0 counted: each of them is four of today's.
create or replace function ulak_private.fine_histogram(p_histogram bigint[])
returns bigint[]
language plpgsql
immutable
as $plpgsql$
declare
    v_fine bigint[] := array_fill(0::bigint, array[86], array[100]);
begin
    for i in 100..array_upper(p_histogram, 1) loop
        v_fine[i] := coalesce(p_histogram[i], 0);
    end loop;
    v_fine[100] := v_fine[100] + coalesce(p_histogram[1], 0);
    for i in 2..22 loop
        if p_histogram[i] > 0 then
            for k in 0..3 loop
                -- As evenly as whole numbers allow.
                v_fine[97 + 4 * (i - 1) + k] := v_fine[97 + 4 * (i - 1) + k] + (p_histogram[i] + k) / 4;
            end loop;
        end if;
    end loop;
    return v_fine;
end
$plpgsql$;
