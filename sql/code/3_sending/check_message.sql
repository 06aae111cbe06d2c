-- Checks of a message before it is queued. Each check raises or returns true, so that it can be called in an expression, which costs a
-- fraction of `perform`.

-- In SQL, so that it is inlined. Most messages pass each line by its first condition.
create or replace function ulak_private.check_message(
    p_payload jsonb,
    p_priority integer,
    p_scheduled_at timestamptz,
    p_idempotency_key text,
    p_expires_at timestamptz,
    p_ordering_key text,
    p_headers jsonb,
    p_metadata jsonb
)
returns boolean
language sql
as $sql$
    select (p_priority between 0 and 10 or ulak_private.check_priority(p_priority))
        and (octet_length(p_payload::text) <= 1024 or ulak_private.check_payloads(array[p_payload]))
        and (p_idempotency_key is null or ulak_private.check_idempotency_key(p_idempotency_key))
        and (p_ordering_key is null or ulak_private.check_key('ordering key', p_ordering_key))
        and (p_headers is null or ulak_private.check_headers(p_headers))
        and (p_metadata is null or ulak_private.check_metadata(p_metadata))
        and (p_scheduled_at is null and p_expires_at is null or ulak_private.check_times(p_scheduled_at, p_expires_at))
$sql$;

create or replace function ulak_private.check_times(p_scheduled_at timestamptz, p_expires_at timestamptz)
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    if not ulak_private.is_sane_time(p_scheduled_at) or not ulak_private.is_sane_time(p_expires_at) then
        raise exception 'scheduled_at and expires_at must be times between the years 1970 and 9000'
            using errcode = '22023',
                detail = format('They are %s and %s.', coalesce(p_scheduled_at::text, 'null'), coalesce(p_expires_at::text, 'null')),
                hint = 'Leave expires_at out for a message that never expires.';
    end if;
    -- One day is the smallest limit that can be configured.
    if p_scheduled_at > now() + interval '1 day' then
        perform ulak_private.check_ahead(p_scheduled_at, now());
    end if;
    return true;
end
$plpgsql$;

-- A message holds up the messages behind it in its ordering key until its time comes.
create or replace function ulak_private.check_ahead(p_scheduled_at timestamptz, p_now timestamptz)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_limit integer := ulak.setting('max_schedule_days')::integer;
begin
    if p_scheduled_at > p_now + make_interval(hours => 24 * v_limit) then
        raise exception 'the message is scheduled further ahead than max_schedule_days'
            using errcode = '22023',
                detail = format('It is for %s, the limit is %s days.', p_scheduled_at, v_limit),
                hint = 'Keep it in a table of your own and send it when its time comes, or have an administrator raise the limit: '
                    || 'select ulak.configure(''max_schedule_days'', ''...'');';
    end if;
    return true;
end
$plpgsql$;

create or replace function ulak_private.check_priority(p_priority integer)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if p_priority is null or p_priority not between 0 and 10 then
        raise exception 'priority must be between 0 and 10'
            using errcode = '22023', detail = format('It is %s.', coalesce(p_priority::text, 'null'));
    end if;
    return true;
end
$plpgsql$;

create or replace function ulak_private.check_payloads(p_payloads jsonb[])
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_size integer;
    v_has_null boolean;
    v_limit integer;
begin
    select max(octet_length(p.payload::text)), bool_or(p.payload is null) into v_size, v_has_null
    from (select unnest(p_payloads)) p(payload);
    if v_has_null then
        raise exception 'the payload is null'
            using errcode = '22004', hint = 'Send the JSON value null as ''null''::jsonb, if that is what you mean.';
    end if;
    -- 1024 is the smallest limit that can be configured.
    if v_size > 1024 then
        v_limit := ulak.setting('max_payload_size')::integer;
        if v_size > v_limit then
            raise exception 'the payload is larger than max_payload_size'
                using errcode = '54000',
                    detail = format('It has %s bytes as text, the limit is %s.', v_size, v_limit),
                    hint = 'Send a reference to the data, or have an administrator raise it: '
                        || 'select ulak.configure(''max_payload_size'', ''...'');';
        end if;
        -- A value of up to 1024 bytes has at most 512 levels, which every parser can read.
        perform ulak_private.check_depth('payload', p_payloads, 1024);
    end if;
    return true;
end
$plpgsql$;

-- JSON parsers recurse with each level, and some give up. The check costs half of what it takes to write the value as text. Values of up to
-- p_free_size bytes as text may be nested to any depth.
create or replace function ulak_private.check_depth(p_what text, p_values jsonb[], p_free_size integer default 0)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_limit integer := ulak.setting('max_json_depth')::integer;
    v_too_deep jsonpath := format('strict $.**{%s}', v_limit);
begin
    if exists (
        select
        from unnest(p_values) v
        where case when jsonb_path_exists(v, v_too_deep) then octet_length(v::text) > p_free_size end
    ) then
        raise exception 'the % is nested deeper than max_json_depth', p_what
            using errcode = '54000',
                detail = format('The limit is %s levels.', v_limit),
                hint = 'Nest it less deeply, or have an administrator raise the limit: select ulak.configure(''max_json_depth'', ''...'');';
    end if;
    return true;
end
$plpgsql$;

-- Checks the stored size and the size as text, which can be thousands of times as long: 1e100000 takes ten bytes.
create or replace function ulak_private.check_size(p_what text, p_value jsonb, p_setting text)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_size bigint := pg_column_size(p_value);
    v_limit integer;
begin
    -- 1024 is the smallest limit that can be configured.
    if v_size <= 1024 then
        v_size := octet_length(p_value::text);
    end if;
    if v_size > 1024 then
        v_limit := ulak.setting(p_setting)::integer;
        if v_size <= v_limit then
            v_size := greatest(v_size, octet_length(p_value::text));
        end if;
        if v_size > v_limit then
            raise exception 'the % are larger than %', p_what, p_setting
                using errcode = '54000',
                    detail = format('They have %s bytes, the limit is %s.', v_size, v_limit),
                    hint = format(
                        'Put it into the payload, or have an administrator raise it: select ulak.configure(%L, ''...'');', p_setting
                    );
        end if;
    end if;
    return true;
end
$plpgsql$;

-- Applications must not be able to forge ulak's events, or events that they may not publish: CloudEvents take their type from here.
create or replace function ulak_private.check_metadata(p_metadata jsonb)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_is_valid boolean := ulak_private.check_size('metadata', p_metadata, 'max_metadata_size')
        and ulak_private.check_depth('metadata', array[p_metadata]);
begin
    if jsonb_typeof(p_metadata) <> 'object' then
        raise exception 'metadata must be a JSON object'
            using errcode = '22023', detail = format('It is of type %s.', jsonb_typeof(p_metadata));
    end if;
    if p_metadata ? 'event_type' then
        perform ulak_private.refuse_reserved_event_type(p_metadata ->> 'event_type');
        perform ulak_private.raise_not_granted(t.name, 'publish')
        from ulak.event_types t
        where t.name = p_metadata ->> 'event_type' and t.is_restricted and not ulak_private.may_publish(t.name);
    end if;
    return v_is_valid;
end
$plpgsql$;

-- Keys are indexed, and an index entry can't be larger than a third of a page.
create or replace function ulak_private.check_key(p_what text, p_key text)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if p_key = '' or octet_length(p_key) > 512 then
        raise exception '% must have 1 to 512 bytes', p_what
            using errcode = '22023', detail = format('It has %s.', octet_length(p_key));
    end if;
    return true;
end
$plpgsql$;

-- Messages that ulak sends itself, such as recurring ones, have reserved keys, so nobody can take those in advance.
create or replace function ulak_private.check_idempotency_key(p_key text)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if starts_with(p_key, 'ulak.') then
        raise exception 'idempotency key "%" is reserved', left(p_key, 200)
            using errcode = '42939',
                detail = 'Keys that start with ulak. are for messages that ulak sends itself.',
                hint = 'Choose another key.';
    end if;
    return ulak_private.check_key('idempotency key', p_key);
end
$plpgsql$;

-- Headers map names to text; a line break would let a sender smuggle its own headers into the request.
create or replace function ulak_private.check_headers(p_headers jsonb)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_is_valid boolean := ulak_private.check_size('headers', p_headers, 'max_headers_size');
    v_name text;
begin
    if jsonb_typeof(p_headers) <> 'object' then
        raise exception 'headers must be a JSON object of names and texts'
            using errcode = '22023', detail = format('It is of type %s.', jsonb_typeof(p_headers));
    end if;
    select h.key into v_name
    from jsonb_each(p_headers) h
    where not ulak_private.is_header_name(h.key)
        or jsonb_typeof(h.value) <> 'string'
        or not ulak_private.is_header_value(h.value #>> '{}')
    limit 1;
    if found then
        raise exception 'header "%" is not a valid header', left(v_name, 64)
            using errcode = '22023',
                hint = 'A name has letters, digits and !#$%&''*+-.^_`|~ only; a value is a text without control characters.';
    end if;
    select h.key into v_name
    from jsonb_object_keys(p_headers) h(key)
    where ulak_private.header_key(h.key) = any (ulak_private.reserved_headers()) or ulak_private.header_key(h.key) ~ '^(ulak|webhook)-'
    limit 1;
    if found then
        raise exception 'header "%" is reserved', left(v_name, 64)
            using errcode = '42939',
                detail = 'The transport sets it, or its name starts with ulak- or webhook-: receivers trust those to be ulak''s. Some take _ for -.',
                hint = 'Choose another name.';
    end if;
    return v_is_valid;
end
$plpgsql$;

-- A message must not replace a header that its endpoint uses to authenticate itself, nor one that belongs to the protocol.
create or replace function ulak_private.check_credentials(p_endpoint_id bigint, p_headers jsonb)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_names text[] := ulak_private.credential_headers(p_endpoint_id, p_headers);
begin
    if v_names <> '{}' then
        raise exception 'header "%" is set by the endpoint', left(v_names[1], 64)
            using errcode = '42501',
                detail = 'A message can''t override the credentials of its endpoint, nor what belongs to the protocol.',
                hint = 'Leave it out, or send to an endpoint whose config doesn''t set it.';
    end if;
    return true;
end
$plpgsql$;

-- Whether a receiver of CloudEvents takes a body of this content type for an event.
create or replace function ulak_private.is_cloudevents_type(p_content_type text)
returns boolean
language sql
immutable
as $sql$
    select p_content_type ~* E'^\\s*application/cloudevents'
$sql$;

-- The headers that only the endpoint itself may set: those of "auth", "proxy" and "signature"; config headers that are secrets; under
-- SigV4, x-amz- headers, which the endpoint's key signs and the service obeys; those that command the broker; and for endpoints that make
-- CloudEvents, their attributes and a content type that would turn the body into an event. PL/pgSQL, though it is one query, because its plan is kept: an SQL function
-- would be planned again by each send().
create or replace function ulak_private.credential_headers(p_endpoint_id bigint, p_headers jsonb)
returns text[]
language plpgsql
stable
as $plpgsql$
begin
    return array(
        select h.key
        from ulak.endpoints e
        join ulak_private.protocol_facts() p on p.protocol = e.protocol
        cross join jsonb_each(p_headers) h
        cross join lateral (select ulak_private.header_key(h.key)) l(name)
        where e.id = p_endpoint_id
            and (
                l.name = 'authorization' and e.config ? 'auth'
                or e.config ? 'signature' and l.name = ulak_private.header_key(ulak_private.signature_header(e.config))
                or l.name = 'proxy-authorization' and e.config ? 'proxy'
                or starts_with(l.name, 'x-amz-') and e.config -> 'auth' ->> 'type' = 'aws_sigv4'
                or l.name ~ p.reserved_headers
                or e.config -> 'cloudevents' = 'true' and (
                    l.name = 'content-type' and ulak_private.is_cloudevents_type(h.value #>> '{}')
                    or starts_with(l.name, p.attribute_prefix)
                        and substr(l.name, length(p.attribute_prefix) + 1)
                            ~ '^(specversion|id|source|type|subject|time|datacontenttype|dataschema|partitionkey|correlationid|traceparent)$'
                )
                or e.config ? 'headers' and exists (
                    select
                    from jsonb_each(e.config -> 'headers') c
                    where ulak_private.header_key(c.key) = l.name
                        and (jsonb_typeof(c.value) = 'object' or l.name in ('authorization', 'proxy-authorization'))
                )
            )
        order by h.key
    );
end
$plpgsql$;

-- check_message() for many. Calls it only for messages that have headers or metadata, or that a cheap test finds suspicious.
create or replace function ulak_private.check_messages(p_messages ulak_private.message[])
returns boolean
language plpgsql
as $plpgsql$
begin
    perform ulak_private.check_payloads(array(select m.payload from unnest(p_messages) m));
    perform ulak_private.check_message(
        m.payload, m.priority, m.scheduled_at, m.idempotency_key, m.expires_at, m.ordering_key, m.headers, m.metadata
    ) and (m.headers is null or ulak_private.check_credentials(m.endpoint_id, m.headers))
    from unnest(p_messages) m
    where num_nonnulls(m.headers, m.metadata) > 0
        or m.priority is null
        or m.priority not between 0 and 10
        or m.idempotency_key = ''
        or starts_with(m.idempotency_key, 'ulak.')
        or m.scheduled_at > now() + interval '1 day'
        or m.ordering_key = ''
        or octet_length(m.idempotency_key) > 512
        or octet_length(m.ordering_key) > 512
        or not ulak_private.is_sane_time(m.scheduled_at)
        or not ulak_private.is_sane_time(m.expires_at);
    return true;
end
$plpgsql$;
