-- A consumer's inbox: which messages it has handled.

create or replace function ulak.mark_handled(p_consumer text, p_key text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_consumer is null or p_key is null then
        raise exception 'consumer and key must not be null' using errcode = '22004';
    end if;
    perform ulak_private.check_key('consumer', p_consumer);
    perform ulak_private.check_key('key', p_key);
    insert into ulak.handled (consumer, key)
    values (p_consumer, p_key)
    on conflict do nothing;
    return found;
end
$plpgsql$;

comment on function ulak.mark_handled(text, text) is
    'a consumer''s inbox: true the first time a key is seen, false after that; part of the caller''s transaction';
