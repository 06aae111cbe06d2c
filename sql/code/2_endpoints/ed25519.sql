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

-- The public half of a key, by RFC 8032: the base point times the scalar that is made of the seed. No server needs a package for it; 255 doublings
-- take 20 ms, only when a key is made or shown.
create or replace function ulak_private.public_key(p_secret text)
returns bytea
language plpgsql
immutable
as $plpgsql$
declare
    c_prime constant numeric := ulak_private.ed25519_prime();
    -- Points have the extended coordinates X, Y, Z and T: x = X/Z, y = Y/Z, x * y = T/Z.
    c_base constant numeric[] := array[
        15112221349535400772501151409588531511454012693041857206046113283949847762202,
        46316835694926478169428394003475163141307993866256225615783033603165251855960,
        1,
        46827403850823179245072216630277197565144205554125654976674165829533817101731
    ];
    -- Padding is often lost on the way. The public half may follow the seed.
    v_text text := rtrim(substr(p_secret, length('whsk_') + 1), '=');
    v_hash bytea := sha512(substr(decode(rpad(v_text, (length(v_text) + 3) / 4 * 4, '='), 'base64'), 1, 32));
    v_point numeric[] := array[0, 1, 1, 0];
    v_inverse numeric := 1;
    v_y numeric;
    v_key bytea := decode(repeat('00', 32), 'hex');
begin
    -- Of the scalar's bits, the highest is set and the lowest three are clear, whatever the hash has there.
    for v_bit in reverse 254..0 loop
        v_point := ulak_private.ed25519_sum(v_point, v_point);
        if v_bit = 254 or (v_bit >= 3 and get_bit(v_hash, v_bit) = 1) then
            v_point := ulak_private.ed25519_sum(v_point, c_base);
        end if;
    end loop;
    -- 1/Z is Z to the power of the prime minus 2: 2^255 - 21, whose bits are all set but two.
    for v_bit in reverse 254..0 loop
        v_inverse := mod(v_inverse * v_inverse, c_prime);
        if v_bit <> 2 and v_bit <> 4 then
            v_inverse := mod(v_inverse * v_point[3], c_prime);
        end if;
    end loop;
    -- y from its lowest byte on, and in the highest bit whether x is odd. mod() keeps the sign.
    v_y := mod(mod(v_point[2] * v_inverse, c_prime) + c_prime, c_prime);
    for v_byte in 0..31 loop
        v_key := set_byte(v_key, v_byte, mod(v_y, 256)::integer);
        v_y := div(v_y, 256);
    end loop;
    return set_bit(v_key, 255, mod(mod(mod(v_point[1] * v_inverse, c_prime) + c_prime, c_prime), 2)::integer);
end
$plpgsql$;

create or replace function ulak_private.ed25519_prime()
returns numeric
language sql
immutable
as $sql$
    select 57896044618658097711785492504343953926634992332820282019728792003956564819949 -- 2^255 - 19
$sql$;

-- The sum of two points, which may be the same one.
create or replace function ulak_private.ed25519_sum(p_a numeric[], p_b numeric[])
returns numeric[]
language plpgsql
immutable
as $plpgsql$
declare
    c_prime constant numeric := ulak_private.ed25519_prime();
    -- Twice the d of the curve: -121665/121666.
    c_2d constant numeric := 16295367250680780974490674513165176452449235426866156013048779062215315747161;
    v_a numeric := mod((p_a[2] - p_a[1]) * (p_b[2] - p_b[1]), c_prime);
    v_b numeric := mod((p_a[2] + p_a[1]) * (p_b[2] + p_b[1]), c_prime);
    v_c numeric := mod(p_a[4] * c_2d * p_b[4], c_prime);
    v_d numeric := mod(p_a[3] * 2 * p_b[3], c_prime);
begin
    return array[
        mod((v_b - v_a) * (v_d - v_c), c_prime),
        mod((v_d + v_c) * (v_b + v_a), c_prime),
        mod((v_d - v_c) * (v_d + v_c), c_prime),
        mod((v_b - v_a) * (v_b + v_a), c_prime)
    ];
end
$plpgsql$;

create or replace function ulak_private.base64url(p_bytes bytea)
returns text
language sql
immutable
as $sql$
    select translate(encode(p_bytes, 'base64'), E'+/=\n', '-_')
$sql$;
