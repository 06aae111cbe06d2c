-- Sent content can't be changed: a retry, a redrive and a replay deliver what the application committed.

create or replace function ulak_private.refuse_payload_change()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'payload and message_id of a message can''t be changed once sent'
        using errcode = '55000', hint = 'Send a new message.';
end
$plpgsql$;

create or replace trigger events_are_immutable
    before update on ulak_private.events
    for each statement
    execute function ulak_private.refuse_payload_change();

-- For each statement: a trigger for each row would have every claim and every settlement lock its rows once more, though
-- they name other columns.
create or replace trigger queue_payload_is_immutable
    before update of payload, message_id on ulak_private.deliveries
    for each statement
    execute function ulak_private.refuse_payload_change();
