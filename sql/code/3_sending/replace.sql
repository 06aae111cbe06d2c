-- Replacing: a new message takes the place of the one that waits under its idempotency key.

-- Like take_idempotency_key(), but a message that waits under the key is replaced, and its id is returned. A message that waits for a retry
-- is cancelled instead, and the new one takes over the key: the receiver may have seen the old one, and would take the new content for a
-- repetition. So is one with another ordering key. If the message is in flight or finished, the new one takes over the key, too.
create or replace function ulak_private.take_place(
    p_message ulak_private.message,
    p_payload_hash text,
    p_id bigint,
    p_if_waiting text,
    p_latest interval
)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_first_id bigint;
    v_waiting ulak_private.deliveries;
begin
    loop
        v_first_id := ulak_private.take_idempotency_key(
            p_message.endpoint_id, p_message.idempotency_key, p_payload_hash, p_id, p_any_payload => true
        );
        if v_first_id = p_id then
            return p_id;
        end if;
        -- The message is locked before its key, in the same order as when it is settled. This waits for a claim in progress.
        select q.* into v_waiting
        from ulak_private.deliveries q
        where q.id = v_first_id and q.status is not distinct from 'pending'
        for no key update;
        if not found then
            update ulak_private.idempotency_keys k
            set free_at = '-infinity'
            where k.endpoint_id = p_message.endpoint_id
                and k.idempotency_key = p_message.idempotency_key
                and k.message_id = v_first_id;
        elsif p_if_waiting = 'error' then
            raise exception 'a message waits under idempotency key "%"', p_message.idempotency_key
                using
                    errcode = '23505',
                    detail = format(
                        'It is message %s of endpoint "%s".',
                        v_first_id,
                        (select e.name from ulak.endpoints e where e.id = p_message.endpoint_id)
                    ),
                    hint = 'To replace it: p_if_waiting => ''replace''.';
        elsif v_waiting.attempts = 0 and v_waiting.ordering_key is not distinct from p_message.ordering_key then
            perform ulak_private.replace_message(v_waiting, p_message, p_payload_hash, p_latest);
            return v_first_id;
        else
            perform ulak_private.cancel(array[v_first_id], ulak_private.caller(), clock_timestamp());
        end if;
    end loop;
end
$plpgsql$;

create or replace function ulak_private.check_replacement(p_idempotency_key text, p_if_waiting text, p_latest interval)
returns void
language plpgsql
as $plpgsql$
begin
    if p_if_waiting is null or p_if_waiting not in ('replace', 'error') then
        raise exception 'p_if_waiting must be replace, keep or error'
            using
                errcode = '22023',
                detail = format('It is %s.', coalesce(quote_literal(left(p_if_waiting, 64)), 'null')),
                hint = 'p_latest belongs to p_if_waiting => ''replace''.';
    elsif p_idempotency_key is null then
        raise exception 'p_if_waiting needs an idempotency key'
            using errcode = '22023', hint = 'The message that waits is found by it: p_idempotency_key => ''cart-7''.';
    elsif p_latest is not null and (p_latest <= interval '0' or p_if_waiting <> 'replace') then
        raise exception 'p_latest must be longer than nothing, and for p_if_waiting => ''replace'''
            using errcode = '22023', detail = format('It is %s.', p_latest);
    end if;
end
$plpgsql$;

-- The message keeps its id, its webhook-id and its place in its ordering key; its content is a new event. The caller has locked it. A
-- parked message becomes due, as in reschedule().
create or replace function ulak_private.replace_message(
    p_waiting ulak_private.deliveries,
    p_message ulak_private.message,
    p_payload_hash text,
    p_latest interval
)
returns void
language plpgsql
as $plpgsql$
declare
    v_event_id bigint := nextval('ulak.queue_id_seq');
    v_scheduled_at timestamptz := least(p_message.scheduled_at, p_waiting.created_at + p_latest);
begin
    insert into ulak_private.events (id, payload, headers, metadata, max_retries)
    values (
        v_event_id,
        p_message.payload,
        ulak_private.stored_headers(p_message.headers),
        p_message.metadata,
        (p_message.headers ->> ':max_retries')::smallint
    );
    update ulak_private.deliveries q
    set event_id = v_event_id,
        event_created_at = now(),
        payload_hash = p_payload_hash,
        priority = p_message.priority,
        scheduled_at = v_scheduled_at,
        next_retry_at = greatest(v_scheduled_at, now()),
        expires_at = p_message.expires_at,
        correlation_id = p_message.correlation_id,
        generation = coalesce((p_message.headers ->> ':generation')::bigint, ulak_private.generation()),
        updated_at = clock_timestamp()
    where q.id = p_waiting.id;
    update ulak_private.idempotency_keys k
    set payload_hash = p_payload_hash, sent_by = ulak_private.caller()
    where k.endpoint_id = p_waiting.endpoint_id
        and k.idempotency_key = p_message.idempotency_key
        and k.message_id = p_waiting.id;
end
$plpgsql$;

-- Checked first, whatever the payload is: any other answer would let others find out what was sent.
create or replace function ulak_private.require_key_owner(p_sent_by text, p_endpoint text, p_idempotency_key text)
returns void
language plpgsql
as $plpgsql$
begin
    if p_sent_by <> ulak_private.caller() and not exists (
        select from pg_roles r where r.rolname = p_sent_by and pg_has_role(ulak_private.caller(), r.oid, 'usage')
    ) then
        raise exception 'idempotency key "%" was used by another sender', p_idempotency_key
            using errcode = '23505',
                detail = format('A message of endpoint "%s" has this key, and another role than "%s" sent it.', p_endpoint, ulak_private.caller()),
                hint = 'Use keys that no other application uses. If one application has several logins, have them set one role.';
    end if;
end
$plpgsql$;
