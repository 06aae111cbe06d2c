-- Tracing (W3C Trace Context): a transaction's trace travels with its messages, and each attempt is a span of its own.

-- A message's headers as they are stored in its event: without the options that have columns of their own (with_options()), and with the
-- trace of the sending transaction (`set local ulak.traceparent`), unless the message has its own.
create or replace function ulak_private.stored_headers(p_headers jsonb)
returns jsonb
language sql
stable
as $sql$
    select case
        when p_headers is null and coalesce(current_setting('ulak.traceparent', true), '') = '' then null
        else ulak_private.with_trace(p_headers - array[':generation', ':max_retries'])
    end
$sql$;

-- An invalid trace of the transaction is left out, as the standard demands: tracing must not fail an application's transaction. The names
-- of a message's own trace headers become lower case.
create or replace function ulak_private.with_trace(p_headers jsonb)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_parent text := current_setting('ulak.traceparent', true);
    v_state text := nullif(current_setting('ulak.tracestate', true), '');
    v_own text[] := array(select h.name from jsonb_object_keys(p_headers) as h (name) where lower(h.name collate "C") in ('traceparent', 'tracestate'));
begin
    if v_own <> '{}' then
        return p_headers - v_own || (select jsonb_object_agg(lower(o.name collate "C"), p_headers -> o.name) from unnest(v_own) as o (name));
    elsif ulak_private.trace_id(v_parent) is null then
        return nullif(p_headers, '{}');
    end if;
    return coalesce(p_headers, '{}')
        || jsonb_build_object('traceparent', v_parent)
        || case
            when octet_length(v_state) <= 512 and ulak_private.is_header_value(v_state) then jsonb_build_object('tracestate', v_state)
            else '{}'
        end;
end
$plpgsql$;

-- The trace id in a traceparent; null if the traceparent isn't valid.
create or replace function ulak_private.trace_id(p_traceparent text)
returns text
language sql
immutable
as $sql$
    select substring(p_traceparent from '^00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$')
$sql$;

-- The span id of an attempt, derived from what identifies the attempt: nothing is stored, and history() can compute it, too.
create or replace function ulak_private.span_id(p_trace_id text, p_id bigint, p_attempt integer)
returns text
language sql
immutable
as $sql$
    select left(encode(sha256(convert_to(p_trace_id || '/' || p_id || '/' || p_attempt, 'UTF8')), 'hex'), 16)
$sql$;

-- A message's headers as an attempt sends them. An invalid trace, which only a message's own can be, is sent unchanged.
create or replace function ulak_private.sent_headers(p_headers jsonb, p_generation bigint, p_id bigint, p_attempt integer)
returns jsonb
language sql
stable
as $sql$
    select case
        when p_headers ? 'traceparent' then ulak_private.with_span(p_headers, p_generation, p_id, p_attempt)
        when p_generation is null then p_headers
        else coalesce(p_headers, '{}') || jsonb_build_object('ulak-generation', p_generation::text)
    end
$sql$;

create or replace function ulak_private.with_span(p_headers jsonb, p_generation bigint, p_id bigint, p_attempt integer)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_parent text := p_headers ->> 'traceparent';
    v_trace_id text := ulak_private.trace_id(v_parent);
begin
    return p_headers
        || jsonb_strip_nulls(jsonb_build_object(
            'ulak-generation', p_generation::text,
            'traceparent', '00-' || v_trace_id || '-' || ulak_private.span_id(v_trace_id, p_id, p_attempt) || right(v_parent, 3)
        ));
end
$plpgsql$;
