"""What the owner of the database must not be able to do by what it sets for everybody who connects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext

import psycopg
import pytest
from support.cluster import Cluster
from support.errors import refused
from support.receiver import Receiver
from support.site import Site
from support.surface import VALUES, arguments, granted

# Each stands in for something of pg_catalog, and records the role that called it.
EVIL = """
    create schema evil;
    grant usage on schema evil to public;
    create table evil.seen (what text, who text default current_user);
    grant insert on evil.seen to public;
    create function evil.note(p_what pg_catalog.text) returns boolean language plpgsql as $$
    begin
        insert into evil.seen (what) values (p_what);
        return true;
    end
    $$;
    create function evil.equal(a pg_catalog.text, b pg_catalog.text) returns boolean language sql as
        $$ select evil.note('=') and a operator(pg_catalog.=) b $$;
    create operator evil.= (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = evil.equal);
    create function evil.equal(a name, b pg_catalog.text) returns boolean language sql as
        $$ select evil.note('name =') and a operator(pg_catalog.=) b $$;
    create operator evil.= (leftarg = name, rightarg = pg_catalog.text, function = evil.equal);
    create function evil.equal(a bigint, b bigint) returns boolean language sql as
        $$ select evil.note('bigint =') and a operator(pg_catalog.=) b $$;
    create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.equal);
    create function evil.differ(a pg_catalog.text, b pg_catalog.text) returns boolean language sql as
        $$ select evil.note('<>') and a operator(pg_catalog.<>) b $$;
    create operator evil.<> (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = evil.differ);
    create function evil.greater(a bigint, b integer) returns boolean language sql as
        $$ select evil.note('>') and a operator(pg_catalog.>) b $$;
    create operator evil.> (leftarg = bigint, rightarg = integer, function = evil.greater);
    create function evil.clock_timestamp() returns timestamptz language sql as
        $$ select pg_catalog.clock_timestamp() where evil.note('clock_timestamp') $$;
    create function evil.now() returns timestamptz language sql as
        $$ select pg_catalog.now() where evil.note('now') $$;
    create domain evil.text as pg_catalog.text check (evil.note('text'));
    create domain evil.float8 as pg_catalog.float8 check (evil.note('float8'));
"""

# Stands in for each function and operator of pg_catalog, and raises. What has pseudo-types can't be made.
SHADOWS = """
    create schema evil;
    create domain evil.text as pg_catalog.int4 check (false);
    create domain evil.int4 as pg_catalog.text check (false);
    create domain evil.int8 as pg_catalog.text check (false);
    create domain evil.bool as pg_catalog.text check (false);
    create domain evil.timestamptz as pg_catalog.text check (false);
    do $do$
    declare
        v_what record;
        v_body constant text := 'begin raise exception %L using errcode = ''XX999''; end';
    begin
        for v_what in
            select
                p.proname as name,
                array_to_string(array(select format_type(t, null) from unnest(p.proargtypes::oid[]) as t), ', ') as types,
                case when p.proretset then 'setof ' else '' end || format_type(p.prorettype, null) as result,
                null as operator,
                null as sides
            from pg_proc as p
            where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f'
            union all
            select
                'operator_' || o.oid,
                concat_ws(', ', format_type(nullif(o.oprleft, 0), null), format_type(o.oprright, null)),
                format_type(o.oprresult, null),
                o.oprname,
                concat('leftarg = ' || format_type(nullif(o.oprleft, 0), null) || ', ', 'rightarg = ', format_type(o.oprright, null))
            from pg_operator as o
            where o.oprnamespace = 'pg_catalog'::regnamespace
        loop
            begin
                execute format(
                    'create function evil.%I(%s) returns %s language plpgsql as %L',
                    v_what.name, v_what.types, v_what.result, format(v_body, 'shadow of ' || coalesce(v_what.operator, v_what.name))
                );
                if v_what.operator is not null then
                    execute format('create operator evil.%s (%s, function = evil.%I)', v_what.operator, v_what.sides, v_what.name);
                end if;
            exception when invalid_function_definition or feature_not_supported or syntax_error or datatype_mismatch then
                null;
            end;
        end loop;
    end
    $do$;
"""


@pytest.fixture
def owned(cluster: Cluster, template: str) -> Iterator[str]:
    """A database of `nobody`, with the extension."""
    with cluster.database("owned", template, "owner nobody") as name:
        yield name


def as_owner(cluster: Cluster, database: str, statement: str) -> None:
    with cluster.connect(database, "nobody") as session:
        session.execute(statement)  # type: ignore[call-overload]


def test_it_cannot_have_configs_go_unchecked(cluster: Cluster, owned: str) -> None:
    as_owner(cluster, owned, f"alter database {owned} set row_security = off")

    with cluster.connect(owned) as superuser:
        assert superuser.execute("show row_security").fetchone() == ("off",)
        denied = refused(superuser, """select ulak.create_endpoint('e', 'pull', '{}', '{"max_retries": "many"}')""")

    assert denied.sqlstate == "22023"


@pytest.fixture
def owner(cluster: Cluster, own_site: Site) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    cluster.ensure_login(own_site.db, "shopkeeper")
    own_site.db.execute(f"alter database {own_site.database} owner to shopkeeper")
    with own_site.connect("shopkeeper") as owner:
        owner.execute(EVIL)
        owner.execute(f"alter database {own_site.database} set search_path = evil, pg_catalog")
        yield owner


def test_the_search_path_of_the_database_bends_no_session_of_ours(
    cluster: Cluster, own_site: Site, receiver: Receiver, owner: psycopg.Connection[tuple[object, ...]]
) -> None:
    own_site.http("shop", receiver.url)
    own_site.send_many(3)

    own_site.start(role=cluster.user)
    receiver.wait_for(3)
    own_site.wait_until_settled()
    for statement in (
        "call ulak.run_maintenance()",
        "select * from ulak.start()",
        "select * from ulak.stop()",
        "select * from ulak.doctor()",
        "select * from ulak.ping('shop')",
        "select ulak.report(1)",
        "select ulak.curl(1)",
    ):
        with own_site.connect() as session:
            session.execute(statement)

    assert owner.execute("select distinct what, who from evil.seen").fetchall() == []


def test_nothing_that_a_role_may_call_looks_names_up_in_the_path_of_the_database(own_site: Site) -> None:
    own_site.db.execute("create table public.orders (id bigint primary key)")
    own_site.db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('shop')")
    own_site.db.execute("select ulak.send('shop', '{}')")
    procedures = [name for name, _ in granted(own_site.db, "p")]
    own_site.db.execute(SHADOWS)
    calls = [
        *(
            f"select * from {name}({arguments(types, values)})"
            for name, types in granted(own_site.db)
            for values in ({}, VALUES)
        ),
        "call ulak.run_maintenance()",
        "call ulak.run_worker(1, 0.1)",
        "call ulak_private.watch_workers()",
        "call ulak.await_delivery(1, interval '0', null)",
        "call ulak.await_delivery(1000000, interval '0', null)",
        "call ulak_private.await_delivery(1, 0, null, null)",
    ]
    assert set(procedures) == {call.split()[1].split("(")[0] for call in calls if call.startswith("call ")}

    reached = []
    with own_site.connect() as superuser:
        superuser.execute("set search_path = evil, pg_catalog")
        assert refused(superuser, "select 'a'::pg_catalog.text = 'b'::pg_catalog.text").message_primary == "shadow of ="
        for call in calls:
            superuser.execute("set search_path = evil, pg_catalog")
            try:
                # A procedure that commits can't run in a transaction.
                with nullcontext() if call.startswith("call") else superuser.transaction(force_rollback=True):
                    superuser.execute(call)
            except psycopg.Error as error:
                if re.search("shadow of|evil", str(error)):
                    reached.append(f"{call}: {error}")

    assert reached == []


def run_jobs(cluster: Cluster, database: str, option: str) -> None:
    """As pg_cron does where it lives, each in a session of its own; all of them as superuser."""
    with cluster.connect(database) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute("select * from ulak.schedule('nightly', '0 3 * * *', 'shop', '1')")
        jobs = db.execute("select command from ulak_private.wanted_jobs(1)").fetchall()
        assert any("nightly" in command for (command,) in jobs)
    for (command,) in jobs:
        with cluster.connect(database, options=f"-c {option}") as session:
            session.execute(command.replace("run_worker(1,", "run_worker(1, 0.2,"))


def test_what_is_scheduled_can_not_be_bent(cron_database: str, cluster: Cluster) -> None:
    with cluster.connect(cron_database) as db:
        db.execute(EVIL)
        try:
            run_jobs(cluster, cron_database, "search_path=evil,pg_catalog")

            assert db.execute("select distinct what, who from evil.seen").fetchall() == []
        finally:
            db.execute("drop schema evil cascade")


def test_what_is_scheduled_runs_where_transactions_are_read_only(cron_database: str, cluster: Cluster) -> None:
    run_jobs(cluster, cron_database, "default_transaction_read_only=on")

    with cluster.connect(cron_database) as db:
        assert db.execute("select count(*) from ulak.queue").fetchone() == (1,)
