-- The rate limit: a bucket of tokens for each endpoint, and the gradual release of a backlog.

-- Messages per second that a config allows; null: no limit.
create or replace function ulak_private.rate_limit(p_config jsonb)
returns double precision
language sql
immutable
as $sql$
    select (p_config #> '{rate_limit,limit}')::double precision
        / case
            when p_config #>> '{rate_limit,interval}' = 'hour' then 3600
            when p_config #>> '{rate_limit,interval}' = 'minute' then 60
            else 1
        end
$sql$;

-- Tokens in the endpoint's bucket. Unless the config sets a burst, the bucket holds a tenth of a second's worth, and at least one token and
-- what comes in until a worker looks again, which is usually 0.05 s later: then no tokens are lost.
create or replace function ulak_private.rate_tokens(p_endpoint ulak.endpoints, p_now timestamptz)
returns double precision
language plpgsql
immutable
as $plpgsql$
declare
    v_limit jsonb := p_endpoint.config -> 'rate_limit';
    v_rate double precision;
    v_burst double precision;
begin
    if v_limit is not null then
        v_rate := ulak_private.rate_limit(p_endpoint.config);
        v_burst := coalesce((v_limit -> 'burst')::double precision, greatest(v_rate / 10, 1 + v_rate / 20));
    end if;
    if p_endpoint.release_rate < coalesce(v_rate, 'infinity') then
        v_rate := p_endpoint.release_rate;
        v_burst := greatest(v_rate / 10, 1 + v_rate / 20);
    end if;
    if v_rate is null then
        return 'infinity';
    end if;
    -- The clock was set back since the last refill: the bucket counts as full.
    if ulak_private.is_ahead(p_endpoint.rate_refilled_at, p_now) then
        return v_burst;
    end if;
    return least(
        v_burst,
        coalesce(
            nullif(p_endpoint.rate_tokens, 'infinity')
                + v_rate * greatest(extract(epoch from p_now - p_endpoint.rate_refilled_at), 0),
            v_burst
        )
    );
end
$plpgsql$;

-- Whether messages that were due before a time are still waiting. For each priority there is one probe of the index for those that are due, and
-- one for those parked behind another of their ordering key.
create or replace function ulak_private.has_held(p_endpoint_id bigint, p_before timestamptz)
returns boolean
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
as $plpgsql$
begin
    return exists (
        select
        from generate_series(0, 10) p(priority)
        cross join lateral (
            (
                select q.next_retry_at as due_at
                from ulak_private.deliveries q
                where q.status = 'pending' and q.endpoint_id = p_endpoint_id and q.priority = p.priority
                order by q.next_retry_at
                limit 1
            )
            union all
            (
                select q.created_at
                from ulak_private.deliveries q
                where q.status = 'pending'
                    and q.endpoint_id = p_endpoint_id
                    and q.priority = p.priority
                    and q.next_retry_at = 'infinity'
                order by q.id
                limit 1
            )
        ) m
        where m.due_at < p_before
    );
end
$plpgsql$;
