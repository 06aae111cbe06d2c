-- curl(): the request of a message as a command for the shell, to see what the receiver sees.

create or replace function ulak.curl(p_id bigint)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_message record;
    v_protocol text;
    v_endpoint record;
begin
    select m.* into v_message
    from ulak_private.message_to_send(p_id) m;
    if not found then
        perform ulak_private.raise_unknown_message(p_id);
    end if;
    select e.protocol into v_protocol
    from ulak.endpoints e
    where e.id = v_message.endpoint_id;
    if v_protocol is distinct from 'http' then
        raise exception 'message % is not sent over http', p_id
            using errcode = '22023',
                detail = coalesce(format('The protocol of its endpoint is %s.', v_protocol), 'Its endpoint was dropped.');
    end if;
    select c.* into v_endpoint from ulak_private.endpoint_configs(array[v_message.endpoint_id]) c;
    if v_endpoint.problem is not null then
        raise exception 'there is no request of message %: %', p_id, v_endpoint.problem
            using errcode = '55000', hint = format('select * from ulak.ping(%L); says the same.', v_endpoint.name);
    end if;
    return ulak_private.curl(
        jsonb_build_object(
            'message', v_message.message,
            'endpoint', to_jsonb(v_endpoint),
            'settings', (select jsonb_object_agg(s.name, ulak.setting(s.name)) from ulak.settings s),
            'version', ulak_private.version()
        )
    );
end
$plpgsql$;

comment on function ulak.curl(bigint) is
    'the request of a message as a curl command, with its payload and with secrets masked';

-- JSON values are passed as text, as the worker gets them: PostgreSQL's own spelling of them is signed and sent.
create or replace function ulak_private.message_to_send(p_id bigint)
returns table (endpoint_id bigint, message jsonb)
language sql
stable
as $sql$
    select
        m.endpoint_id,
        jsonb_build_object(
            'id', p_id,
            'message_id', m.message_id,
            'attempt', greatest(m.attempts, 1),
            'payload', m.payload::text,
            'headers', ulak_private.sent_headers(m.headers, m.generation, p_id, greatest(m.attempts, 1))::text,
            'metadata', m.metadata::text,
            'correlation_id', m.correlation_id,
            'ordering_key', m.ordering_key,
            'created_at', m.created_at::text
        )
    from ulak_private.find_message(p_id) m
$sql$;

create or replace function ulak_private.curl(p_request jsonb)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    import json
    import time
    from ulak.transports.http import curl_command

    return curl_command.curl(json.loads(p_request), time.time())
$python$;
