-- Ed25519: receivers verify signatures with the public half of the key. A signing secret that starts with whsk_ is such a key.

create or replace function ulak.public_keys(p_endpoint text, p_now timestamptz default clock_timestamp())
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.endpoint_id(p_endpoint);
    v_keys jsonb;
begin
    select jsonb_agg(
        jsonb_build_object('kty', 'OKP', 'crv', 'Ed25519', 'use', 'sig', 'alg', 'EdDSA', 'x', x.x, 'kid', ulak_private.base64url(
            -- The thumbprint of RFC 7638.
            sha256(convert_to(format('{"crv":"Ed25519","kty":"OKP","x":"%s"}', x.x), 'UTF8'))
        ))
        order by s.place
    )
    into v_keys
    from ulak_private.endpoint_configs(array[v_endpoint_id], ulak_private.clock(p_now)) c
    cross join lateral unnest(c.signing_secrets) with ordinality s(secret, place)
    cross join lateral (select ulak_private.base64url(ulak_private.public_key(s.secret))) x(x)
    where starts_with(s.secret, 'whsk_');
    if v_keys is null then
        raise exception 'endpoint "%" has no Ed25519 key', p_endpoint
            using errcode = '22023',
                detail = 'Keys are made by ulak.rotate_secret() where the config has "signature": {"scheme": "ed25519"}.',
                hint = format(
                    'select ulak.alter_endpoint(name, config || ''{"signature": {"scheme": "ed25519"}}'') from ulak.endpoints where name = %1$L; select ulak.rotate_secret(%1$L);',
                    p_endpoint
                );
    end if;
    return jsonb_build_object('keys', v_keys)::text;
end
$plpgsql$;

comment on function ulak.public_keys(text, timestamptz) is
    'the public keys of an endpoint that signs with Ed25519, as a JSON Web Key Set: the current one, and during a rotation the one before';

create or replace function ulak_private.public_key(p_secret text)
returns bytea
language plpgsql
stable
as $plpgsql$
declare
    v_key bytea := ulak_private.derive_public_key(p_secret);
begin
    if v_key is null then
        raise exception 'python3-cryptography is not installed on this server'
            using errcode = '55000',
                detail = 'It makes the public half of an Ed25519 key; workers and nodes sign with it.',
                hint = 'As root on the server: apt-get install python3-cryptography';
    end if;
    return v_key;
end
$plpgsql$;

create or replace function ulak_private.derive_public_key(p_secret text)
returns bytea
language plpython3u
stable
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak.transports.http import ed25519

    return ed25519.public_key(p_secret)
$python$;

create or replace function ulak_private.base64url(p_bytes bytea)
returns text
language sql
immutable
as $sql$
    select translate(encode(p_bytes, 'base64'), E'+/=\n', '-_')
$sql$;
