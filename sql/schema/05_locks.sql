-- Locks of ulak's own sessions. A row can be locked only by roles with a grant on the table, and there are none;
-- an advisory lock can be taken by anybody who can log in.

create table ulak_private.locks (
    name text primary key
);

comment on table ulak_private.locks is 'one row per thing that one transaction at a time may do; private to ulak';
comment on column ulak_private.locks.name is 'what the row''s lock stands for, as in sql/code/1_foundations/locks.sql';
