-- "Did you mean": the known name that is nearest to an unknown one.

-- Edits (insert, delete, replace, swap of two neighbours) from one text to the other.
create or replace function ulak_private.edit_distance(p_from text, p_to text)
returns integer
language plpgsql
immutable strict
as $plpgsql$
declare
    v_from text[] := string_to_array(p_from, null);
    v_to text[] := string_to_array(p_to, null);
    v_before_previous integer[];
    v_previous integer[];
    v_current integer[];
    v_best integer;
begin
    -- Each row holds the distances from one prefix of p_from to every prefix of p_to; subscript 1 is the empty prefix.
    v_previous := array(select n from generate_series(0, cardinality(v_to)) as n);
    for i in 1 .. cardinality(v_from) loop
        v_current := array[i];
        for j in 1 .. cardinality(v_to) loop
            v_best := least(
                v_previous[j + 1] + 1,
                v_current[j] + 1,
                v_previous[j] + (v_from[i] <> v_to[j])::integer
            );
            if i > 1 and j > 1 and v_from[i] = v_to[j - 1] and v_from[i - 1] = v_to[j] then
                v_best := least(v_best, v_before_previous[j - 1] + 1);
            end if;
            v_current[j + 1] := v_best;
        end loop;
        v_before_previous := v_previous;
        v_previous := v_current;
    end loop;
    return v_previous[cardinality(v_to) + 1];
end
$plpgsql$;

-- Null if nothing is near. A name that contains the other ("secret" in "signing_secret") is near as well.
create or replace function ulak_private.nearest(p_name text, p_known text[])
returns text
language sql
immutable
as $sql$
    with candidate as (
        -- Only the 100 likeliest names are measured, so the cost stays small however many are known.
        select
            known,
            lower(left(p_name, 64) collate "C") as wanted,
            lower(left(known, 64) collate "C") as offered
        from unnest(p_known) as known
        order by
            lower(left(known, 1) collate "C") = lower(left(p_name, 1) collate "C") desc,
            abs(length(known) - length(p_name)),
            known
        limit 100
    ),
    measured as (
        select
            known,
            greatest(length(wanted), length(offered)) as length,
            ulak_private.edit_distance(wanted, offered) as distance,
            least(length(wanted), length(offered)) >= 3
                and (strpos(wanted, offered) > 0 or strpos(offered, wanted) > 0) as is_part
        from candidate
    )
    select known
    from measured
    where is_part or (distance <= greatest(2, ceil(length / 3.0)) and distance < length)
    order by case when is_part then least(distance, 2) else distance end, distance, known
    limit 1
$sql$;

-- The hint of an "unknown name" error.
create or replace function ulak_private.did_you_mean(p_name text, p_known text[])
returns text
language sql
immutable
as $sql$
    select coalesce(
        'Did you mean "' || ulak_private.nearest(p_name, p_known) || '"?',
        case
            when cardinality(p_known) between 1 and 40
                then 'Known: ' || (select string_agg(known, ', ' order by known) from unnest(p_known) as known) || '.'
        end,
        'No known name is similar.'
    )
$sql$;

