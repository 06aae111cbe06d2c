-- Endpoints that anybody on the way could read or imitate. Internal hosts are left to their administrators.
create or replace function ulak_private.doctor_signatures()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    with public_endpoint as materialized (
        select
            e.name,
            e.config,
            case when jsonb_typeof(e.config -> 'signing_secret') = 'string' then e.config ->> 'signing_secret' else s.value end as secret
        from ulak.endpoints e
        left join ulak_private.secrets s on s.name = e.config #>> '{signing_secret,$secret}'
        where e.protocol = 'http' and e.enabled and ulak_private.is_public_url(e.config ->> 'url')
    )
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and its requests are not signed: anybody could send such requests to it', p.name),
        format('select ulak.rotate_secret(%L); -- returns the secret for the receiver', p.name)
    from public_endpoint p
    where p.secret is null
    union all
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and signed with a short secret of %s bytes', p.name, s.bytes),
        format('select ulak.rotate_secret(%L); -- both secrets sign for 24 hours', p.name)
    from public_endpoint p
    cross join lateral (
        select case
            when starts_with(p.secret, 'whsec_') then length(rtrim(substr(p.secret, 7), '=')) * 3 / 4
            else octet_length(p.secret)
        end
    ) s (bytes)
    where s.bytes < 24
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and reached without TLS: anybody on the way can read its messages', p.name),
        -- Without the url: its path and query may hold a token.
        format(
            'update ulak.endpoints set config = jsonb_set(config, ''{url}'', '
            'to_jsonb(regexp_replace(config ->> ''url'', ''^http:'', ''https:'', ''i''))) where name = %L; -- if it answers there',
            p.name
        )
    from public_endpoint p
    where p.config ->> 'url' ~* '^http:'
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and its certificate is not verified', p.name),
        format('update ulak.endpoints set config = config - ''ssl_verify'' where name = %L;', p.name)
    from public_endpoint p
    where p.config -> 'ssl_verify' = 'false'
$sql$;

-- Judged by its form: a name with a dot that isn't kept for internal use, or an address outside of the private ranges.
create or replace function ulak_private.is_public_url(p_url text)
returns boolean
language sql
immutable
as $sql$
    select case
        when h.host ~ '^[0-9.]+$' then h.host !~ E'^(0|10|127|169\\.254|192\\.168|172\\.(1[6-9]|2[0-9]|3[01])|100\\.(6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7]))\\.'
        when h.host ~ E'^\\[' then h.host !~* E'^\\[(::1?|f[cd][0-9a-f]{2}:.*|fe[89ab][0-9a-f]:.*)\\]$'
        else h.host ~ E'\\.' and h.host !~* E'\\.(local|localhost|internal|intranet|lan|home|corp|private|test)\\.?$'
    end
    from (select substring(p_url from E'^[A-Za-z]+://(\\[[^\\]]*\\]|[^/:?#]+)')) h (host)
$sql$;
