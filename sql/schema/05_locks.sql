-- What ulak's own sessions exclude each other by. A row can be locked only by who was granted the table, and nobody is;
-- an advisory lock can be taken by anybody who can log in.

create table ulak_private.locks (
    name text primary key
);

comment on table ulak_private.locks is 'one row per thing that one transaction at a time may do; private to ulak';
comment on column ulak_private.locks.name is 'what the row''s lock stands for, as in sql/code/1_foundations/locks.sql';
