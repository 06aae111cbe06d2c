-- Settings: their names and ranges, their current values, and how to change them.

-- The names, defaults and ranges. kind: integer, boolean, choice (of choices), text, networks (a list of CIDRs), hosts (a list of names).
create or replace view ulak.settings as
select
    d.name,
    coalesce(v.value, d.default_value) as value,
    d.default_value,
    d.minimum,
    d.maximum,
    d.choices,
    d.unit,
    d.kind,
    d.description
from (
    values
        ('archive_after', 'integer', '3600', 0, 31536000, null::text[], 'seconds', 'how long the idempotency key of a delivered message stays taken'),
        ('archive_retention_months', 'integer', '6', 1, 120, null, 'months', 'how long archived messages are kept'),
        ('batch_size', 'integer', '500', 1, 10000, null, 'messages', 'maximum number of messages that a worker claims at once'),
        ('capture_response', 'boolean', 'false', null, null, null, null, 'whether the receiver''s answer is kept with the message'),
        ('circuit_breaker_cooldown', 'integer', '30', 5, 3600, null, 'seconds', 'how long an open circuit breaker waits before it sends a probe'),
        ('circuit_breaker_counts', 'choice', 'retryable', null, null, '{retryable,all}', null, 'which failures count: retryable ones only, or all, permanent ones too'),
        ('circuit_breaker_slow_start', 'boolean', 'true', null, null, null, null, 'whether a circuit that has closed lets through one message at first, and one more in flight with each success'),
        ('circuit_breaker_threshold', 'integer', '10', 1, 1000, null, 'failures', 'consecutive failures that open an endpoint''s circuit breaker'),
        ('cloudevents_source', 'text', '/ulak', null, null, null, null, 'source attribute of CloudEvents'),
        ('default_backoff', 'choice', 'exponential', null, null, '{exponential,linear,fixed,quadratic}', null, 'backoff of endpoints whose retry policy names none'),
        ('default_jitter', 'choice', 'none', null, null, '{none,full,equal}', null, 'jitter of endpoints whose retry policy names none'),
        ('default_max_retries', 'integer', '10', 0, 1000, null, 'retries', 'retries before a message goes to the dead-letter queue'),
        ('dlq_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long dead letters are kept'),
        ('event_log_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long entries of ulak.event_log are kept'),
        ('generation', 'integer', '0', 0, 2147483647, null, 'generations', 'generation of messages that are sent without one of their own; 0: none'),
        ('http_allow_internal_urls', 'boolean', 'false', null, null, null, null, 'whether requests may go to private, loopback and other internal addresses'),
        ('http_allowed_hosts', 'hosts', '', null, null, null, null, 'hosts that may be called, over every protocol: names, or *.example.com for all below it, separated by commas; empty: any host'),
        ('http_allowed_networks', 'networks', '', null, null, null, null, 'internal networks that requests may go to nevertheless: CIDRs, separated by commas'),
        ('http_connect_timeout', 'integer', '5', 1, 60, null, 'seconds', 'longest wait for a connection'),
        ('http_timeout', 'integer', '10', 1, 300, null, 'seconds', 'longest duration of a request'),
        ('inbox_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long ulak.mark_handled() remembers a key'),
        ('lease_seconds', 'integer', '30', 5, 3600, null, 'seconds', 'how long a worker''s claim is valid; it is renewed after a third of this time'),
        ('log_dlq', 'boolean', 'false', null, null, null, null, 'whether each minute''s dead letters are a line of the server''s log for each endpoint: its name and how many'),
        ('max_pending', 'integer', '0', 0, 2147483647, null, 'messages', 'maximum number of messages that may wait for an endpoint whose config has no max_pending; 0: no limit'),
        ('max_headers_size', 'integer', '16384', 1024, 1048576, null, 'bytes', 'maximum size of a message''s headers'),
        ('max_json_depth', 'integer', '100', 10, 500, null, 'levels', 'maximum nesting of metadata, and of payloads larger than 1024 bytes'),
        ('max_metadata_size', 'integer', '65536', 1024, 10485760, null, 'bytes', 'maximum size of a message''s metadata'),
        ('max_payload_size', 'integer', '1048576', 1024, 104857600, null, 'bytes', 'largest payload that send() accepts'),
        ('max_queue_size', 'integer', '1000000', 0, 2147483647, null, 'messages', 'maximum number of messages that may wait or be in flight; 0: no limit'),
        ('max_schedule_days', 'integer', '366', 1, 36500, null, 'days', 'how far ahead a message may be scheduled'),
        ('poll_interval', 'integer', '50', 5, 60000, null, 'milliseconds', 'longest pause of an idle worker before it looks for messages again'),
        ('poll_interval_busy', 'integer', '2', 1, 1000, null, 'milliseconds', 'pause of a worker while traffic flows'),
        ('priority_aging', 'integer', '0', 0, 86400, null, 'seconds', 'a waiting message gains one step of priority each time this passes; 0: never'),
        ('require_bound_secrets', 'boolean', 'false', null, null, null, null, 'whether configs may name only secrets that set_secret() has bound to hosts'),
        ('response_body_max_size', 'integer', '65536', 0, 10485760, null, 'bytes', 'maximum size of a captured response body; the rest is cut'),
        ('retry_base_delay', 'integer', '10', 1, 3600, null, 'seconds', 'delay before the first retry'),
        ('retry_increment', 'integer', '30', 1, 3600, null, 'seconds', 'delay that linear backoff adds with each retry'),
        ('retry_max_delay', 'integer', '300', 1, 86400, null, 'seconds', 'longest delay between retries'),
        ('stale_recovery_timeout', 'integer', '300', 60, 3600, null, 'seconds', 'lease of an external worker that does not name one'),
        ('stats_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long the counters in ulak.endpoint_stats are kept: two days by the minute, then by the hour'),
        ('turn_interval', 'integer', '7', 0, 1000, null, 'milliseconds', 'least time between two turns of a worker that has no backlog; each stores outcomes and claims: longer costs less processor at some hundred messages a second, and delays each by half of it'),
        ('worker_concurrency', 'integer', '128', 1, 1000, null, 'requests', 'maximum number of requests that one worker has in flight to one endpoint'),
        ('workers', 'integer', '2', 0, 32, null, 'workers', 'number of workers that ulak.start() schedules by default; 0 if nodes deliver')
    ) as d (name, kind, default_value, minimum, maximum, choices, unit, description)
left join ulak.setting_values as v on v.name = d.name
order by d.name;

comment on view ulak.settings is 'every setting with its value, default, range and meaning; change one with ulak.configure()';
comment on column ulak.settings.name is 'what ulak.configure() and ulak.setting() take';
comment on column ulak.settings.value is 'the value, the same for everybody';
comment on column ulak.settings.default_value is 'the value after ulak.configure(name, null)';
comment on column ulak.settings.minimum is 'smallest value of an integer';
comment on column ulak.settings.maximum is 'largest value of an integer';
comment on column ulak.settings.choices is 'the values that a choice can have';
comment on column ulak.settings.unit is 'what the number counts';
comment on column ulak.settings.kind is 'integer, boolean, choice, text, networks or hosts';
comment on column ulak.settings.description is 'what it does';

-- The defaults again, as one constant: looking one up in the view takes five times as long.
do $plpgsql$
begin
    execute format(
        $function$
        create or replace function ulak_private.setting_default(p_name text)
        returns text
        language sql
        immutable
        parallel safe
        as $sql$ select %L::jsonb ->> p_name $sql$
        $function$,
        (select jsonb_object_agg(s.name, s.default_value) from ulak.settings as s)
    );
end
$plpgsql$;

-- Qualifies its operator instead of setting a search_path, which would cost half as much again: each claim reads several settings.
create or replace function ulak_private.stored_setting(p_name text)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_value text;
begin
    select v.value into v_value from ulak.setting_values as v where v.name operator(pg_catalog.=) p_name;
    if not found then
        v_value := ulak_private.setting_default(p_name);
        if v_value is null then
            perform ulak_private.raise_unknown_setting(p_name);
        end if;
    end if;
    return v_value;
end
$plpgsql$;

-- Server parameters, such as ulak.batch_size, have no effect, wherever they are set: doctor() lists them.
create or replace function ulak.setting(p_name text)
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak_private.stored_setting(p_name);
end
$plpgsql$;

comment on function ulak.setting(text) is 'the value of a setting, the same for everybody';

create or replace function ulak.configure(p_name text, p_value text)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_old text := ulak_private.stored_setting(p_name);
    v_new text;
begin
    if p_value is null then
        delete from ulak.setting_values where name = p_name;
        v_new := ulak_private.setting_default(p_name);
    else
        v_new := ulak_private.checked_setting(
            p_name,
            p_value,
            format('select ulak.configure(%L, %L);', p_name, ulak_private.setting_default(p_name))
        );
        insert into ulak.setting_values as v (name, value)
        values (p_name, v_new)
        on conflict (name) do update set value = v_new, updated_at = now(), updated_by = ulak_private.caller();
    end if;
    if v_new <> v_old then
        insert into ulak.event_log (event, old_value, new_value, detail)
        values ('setting.changed', to_jsonb(v_old), to_jsonb(v_new), jsonb_build_object('setting', p_name));
    end if;
    if p_name = 'max_queue_size' then
        perform ulak_private.forget_headroom();
    elsif p_name = 'max_pending' then
        perform ulak_private.apply_max_pending();
    end if;
    perform ulak_private.wake_workers();
    return v_new;
end
$plpgsql$;

comment on function ulak.configure(text, text) is
    'changes a setting for everybody and returns its new value; null resets it to its default';

-- The value in its canonical form, or an error whose hint is p_remedy.
create or replace function ulak_private.checked_setting(p_name text, p_value text, p_remedy text)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_setting ulak.settings;
    v_value text := btrim(p_value);
    v_valid boolean;
begin
    select * into v_setting from ulak.settings as s where s.name = p_name;
    if not found then
        perform ulak_private.raise_unknown_setting(p_name);
    end if;
    case v_setting.kind
        when 'integer' then
            v_value := coalesce(ulak_private.duration(v_value, v_setting.unit), v_value);
            v_valid := v_value ~ '^[+-]?[0-9]{1,18}$' and v_value::bigint between v_setting.minimum and v_setting.maximum;
            v_value := case when v_valid then v_value::bigint::text end;
        when 'boolean' then
            v_valid := lower(v_value collate "C") in ('true', 'on', 'yes', '1', 'false', 'off', 'no', '0');
            v_value := case when v_valid then v_value::boolean::text end;
        when 'choice' then
            v_value := lower(v_value collate "C");
            v_valid := v_value = any(v_setting.choices);
        when 'networks' then
            v_value := ulak_private.networks(v_value);
            v_valid := v_value is not null;
        when 'hosts' then
            v_value := ulak_private.host_list(string_to_array(v_value, ','));
            v_valid := v_value is not null;
        else
            v_valid := v_value ~ E'^[\\x21-\\x7e]+$' and length(v_value) <= 2048;
    end case;
    if not v_valid then
        raise exception 'invalid value for setting %', p_name
            using
                errcode = '22023',
                detail = format(
                    '%s takes %s (default %s).',
                    p_name,
                    ulak_private.setting_range(v_setting),
                    coalesce(nullif(v_setting.default_value, ''), 'empty')
                ),
                hint = case v_setting.kind
                    when 'networks' then format('select ulak.configure(%L, %L);', p_name, ulak_private.whole_networks(p_value))
                    when 'hosts' then format('select ulak.configure(%L, ''api.example.com,*.example.org'');', p_name)
                    else p_remedy
                end;
    end if;
    return v_value;
end
$plpgsql$;

-- A duration such as '30s', '5 min' or '1 d' as a whole number of the unit; null if it isn't one. A month has no fixed number of days, so
-- the two aren't converted into each other.
create or replace function ulak_private.duration(p_value text, p_unit text)
returns text
language plpgsql
immutable
as $plpgsql$
declare
    v_interval interval;
    v_months integer;
    v_number numeric;
begin
    if p_value !~ '[A-Za-z]$' or p_unit not in ('milliseconds', 'seconds', 'days', 'months') then
        return null;
    end if;
    v_interval := p_value::interval;
    v_months := extract(year from v_interval) * 12 + extract(month from v_interval);
    if p_unit = 'months' then
        v_number := case when v_interval = make_interval(months => v_months) then v_months end;
    elsif v_months = 0 then
        v_number := extract(epoch from v_interval);
        v_number := case p_unit when 'milliseconds' then v_number * 1000 when 'days' then v_number / 86400 else v_number end;
    end if;
    return case when v_number = trunc(v_number) then trunc(v_number)::bigint::text end;
exception
    when invalid_datetime_format or datetime_field_overflow or interval_field_overflow or numeric_value_out_of_range
        or feature_not_supported then
        return null;
end
$plpgsql$;

-- In words: "an integer from 5 to 3600, in seconds, or a duration such as 5 min".
create or replace function ulak_private.setting_range(p_setting ulak.settings)
returns text
language sql
immutable
as $sql$
    select case p_setting.kind
        when 'integer' then format(
            'an integer from %s to %s, in %s%s',
            p_setting.minimum,
            p_setting.maximum,
            p_setting.unit,
            case p_setting.unit
                when 'milliseconds' then ', or a duration such as 200 ms'
                when 'seconds' then ', or a duration such as 5 min'
                when 'days' then ', or a duration such as 2 weeks'
                when 'months' then ', or a duration such as 1 year'
                else ''
            end
        )
        when 'boolean' then 'true or false'
        when 'choice' then 'one of ' || array_to_string(p_setting.choices, ', ')
        when 'networks' then 'CIDRs such as 10.1.0.0/16, separated by commas'
        when 'hosts' then 'names of hosts without a port, such as api.example.com or *.example.com, or addresses, separated by commas'
        else '1 to 2048 printable ASCII characters without spaces'
    end
$sql$;

-- The list in the form that the worker reads: PostgreSQL also accepts 10.1/16, Python doesn't. Null if an entry isn't a network.
create or replace function ulak_private.networks(p_list text)
returns text
language plpgsql
immutable
as $plpgsql$
begin
    return coalesce(
        (
            select string_agg(btrim(n.network)::cidr::text, ',' order by n.place)
            from unnest(string_to_array(p_list, ',')) with ordinality n(network, place)
        ),
        ''
    );
exception
    when invalid_text_representation then
        return null;
end
$plpgsql$;

-- For a hint: the network of each address, since 127.0.0.1/8 isn't one itself. An example if the list can't be read.
create or replace function ulak_private.whole_networks(p_list text)
returns text
language plpgsql
immutable
as $plpgsql$
begin
    return (
        select string_agg(network(btrim(n.network)::inet)::text, ',' order by n.place)
        from unnest(string_to_array(p_list, ',')) with ordinality n(network, place)
    );
exception
    when invalid_text_representation then
        return '10.1.0.0/16,192.168.0.0/16';
end
$plpgsql$;

create or replace function ulak_private.raise_unknown_setting(p_name text)
returns void
language plpgsql
stable
as $plpgsql$
begin
    raise exception 'unknown setting %', coalesce(quote_ident(p_name), 'null')
        using
            errcode = '42704',
            detail = 'select * from ulak.settings; lists them all.',
            hint = ulak_private.did_you_mean(p_name, array(select s.name from ulak.settings as s));
end
$plpgsql$;
