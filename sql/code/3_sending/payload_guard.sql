-- Sent content can't be changed: a retry, a redrive and a replay deliver what the application committed.

create or replace function ulak_private.refuse_change_of_sent()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'payload, headers, metadata and message_id of a message can''t be changed once sent'
        using errcode = '55000', hint = 'Send a new message.';
end
$plpgsql$;
