-- What sessions still call that were in the middle of a function of 0.2.0 when the extension was upgraded. Goes with the release after this one.

create or replace function ulak._kafka_headers_violation(p_headers jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._broker_headers_violation(p_headers, '^(ulak-|ce_|content-type$)')
$sql$;

create or replace function ulak._missing_client(p_protocol text)
returns text
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._missing_client(p_protocol, '{}')
$sql$;
