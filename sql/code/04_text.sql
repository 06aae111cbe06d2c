-- What a text may hold, wherever it comes from. Without a search_path of their own these are inlined.

create or replace function ulak._has_control_characters(p_text text)
returns boolean
language sql
immutable
as $sql$
    select p_text ~ E'[\\x01-\\x1f\\x7f]'
$sql$;

create or replace function ulak._is_header_name(p_name text)
returns boolean
language sql
immutable
as $sql$
    select p_name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
$sql$;

-- Tabs may stand in it; a line break would begin another header.
create or replace function ulak._is_header_value(p_value text)
returns boolean
language sql
immutable
as $sql$
    select p_value !~ E'[\\x01-\\x08\\x0a-\\x1f\\x7f]'
$sql$;
