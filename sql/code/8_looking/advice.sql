-- The meaning of an endpoint's last error, and what to do about it.

-- Lasting: retries won't help until somebody changes something. An error starts with its kind, in the worker's words; the text after the
-- colon may be the receiver's.
create or replace function ulak_private.advice(p_name text, p_error text)
returns table (cause text, fix text, is_lasting boolean)
language sql
stable
as $sql$
    select
        case when e.is_token then 'its token server: ' else '' end || a.cause,
        case
            when a.fix is null then format('select * from ulak.ping(%L);', p_name)
            when starts_with(a.fix, 'select ') then a.fix
            else format('select * from ulak.ping(%L); -- %s', p_name, a.fix)
        end,
        a.is_lasting
    from (
        select
            regexp_replace(p_error, E'^\\[[A-Z]+\\] (OAuth2 token request: )?', ''),
            coalesce(p_error ~ E'^\\[[A-Z]+\\] OAuth2 token request: ', false)
    ) e (error, is_token)
    cross join lateral (
        select v.cause, v.fix, v.is_lasting
        from (
            values
                ('{message: }'::text[], false, 'the message can''t be sent like this', 'the receiver is not to blame: correct what the application sends'),
                (
                    '{HTTP 401,HTTP 403,HTTP 407}', true, 'it refuses our credentials',
                    'then correct "auth", "headers" or the signing secret in its config'
                ),
                (
                    '{HTTP 3}', true, 'it has moved, and redirects are not followed',
                    'the response has the new address in "location": put it into "url" of its config'
                ),
                ('{HTTP 404,HTTP 405}', true, 'there is nothing at its url, or not for this method', 'then correct "url" or "method" in its config'),
                ('{HTTP 410}', true, 'it is gone for good', format('then: select ulak.disable_endpoint(%L);', p_name)),
                ('{HTTP 429}', false, 'it gets more messages than it can take', 'then set "rate_limit" in its config'),
                ('{HTTP 4}', false, 'it refuses the messages', 'and compare its answer with what is sent: ulak.curl()'),
                ('{HTTP 5}', false, 'it has an error of its own', null),
                ('{blocked: }', true, 'its address is blocked', ulak_private.unblock(e.error)),
                ('{timeout: }', false, 'it does not answer in time', 'if it needs longer: raise "timeout" in its config'),
                ('{resolve: }', true, 'its host name is not known', 'then correct the host in its config'),
                ('{connect: }', false, 'nothing answers at its address', 'then start the receiver, or correct the host in its config'),
                ('{tls: }', true, 'its certificate is not accepted', 'then have it renewed, or name its authorities in its config: "tls_ca_bundle", "tls_ca_cert"'),
                (
                    '{tls: no handshake: }', true, 'it does not speak TLS at this port, or none that we accept',
                    'then correct the port in its config, or reach it without TLS: http:// in "url", or "tls": false'
                ),
                ('{config: }', true, 'no request can be built from its config', 'then correct its config'),
                ('{lease expired: ,"the session of worker "}', false, 'the workers that held its messages went silent', 'and look at the workers: select * from ulak.get_worker_status();'),
                ('{login: }', true, 'it refuses our credentials', 'then correct user and password in its config, or what that user may do'),
                (
                    '{unroutable: }', true, 'no queue or stream takes its messages',
                    'then bind or create one, or correct "exchange" and "routing_key", or "subject", in its config'
                ),
                ('{channel: }', false, 'it closes the channel', 'its reason is in last_error: a missing exchange, or a missing permission of the user'),
                ('{refused: }', false, 'its queue or stream is full, or has failed', 'its reason is in last_error'),
                -- Other errors of a broker start with the name of its protocol.
                (
                    array(select p.protocol || ': ' from ulak_private.protocol_facts() p), false, 'the broker refuses the messages',
                    'its reason is in last_error'
                ),
                (
                    '{"mqtt: dotted: "}', true, 'it closes the connection at each message for a topic with a dot',
                    'NATS before version 2.10 is such a broker: use slashes in "topic", or an endpoint of protocol nats'
                ),
                ('{network: }', false, 'the connection to it breaks off', null),
                ('{worker: }', false, 'the worker has failed', 'and report it: it is a defect of ulak'),
                ('{""}', false, 'its answers don''t count as success', null)
        ) v (beginnings, is_lasting, cause, fix)
        cross join unnest(v.beginnings) b (beginning)
        where starts_with(coalesce(e.error, ''), b.beginning)
        -- HTTP 429 says more than HTTP 4.
        order by length(b.beginning) desc
        limit 1
    ) a
$sql$;

-- The statement that adds the network of such an error to the allowed ones. Null if the error names none, or one that is wider than any
-- internal network (10.0.0.0/8, fc00::/7): nobody should open that.
create or replace function ulak_private.unblock(p_error text)
returns text
language sql
stable
as $sql$
    select format(
        'select ulak.configure(''http_allowed_networks'', %L);',
        concat_ws(',', nullif(ulak.setting('http_allowed_networks'), ''), n.network)
    )
    from (
        select substring(p_error from E'^blocked: .*''http_allowed_networks'', ''(?:[0-9a-f.:/]+,)*([0-9a-f.:]+/[0-9]+)''\\);$')
    ) n (network)
    where case when n.network ~ ':' then masklen(n.network::cidr) >= 7 else masklen(n.network::cidr) >= 8 end
$sql$;

-- Whether such an error is from before the network was allowed.
create or replace function ulak_private.is_unblocked(p_error text)
returns boolean
language sql
stable
as $sql$
    select ulak.setting('http_allow_internal_urls')::boolean or exists (
        select
        from unnest(string_to_array(nullif(ulak.setting('http_allowed_networks'), ''), ',')) n (network)
        where n.network::cidr >>= substring(
            p_error from E'^\\[[A-Z]+\\] (?:OAuth2 token request: )?blocked: address ([0-9a-f.:]+) is blocked'
        )::inet
    )
$sql$;
