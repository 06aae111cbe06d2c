"""What an application must not be able to do to another one in the same database, nor a pooled session with the role of another."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.errors import refused

DB = psycopg.Connection[Any]

SEND = [
    "select ulak.send('bank', '1')",
    "select ulak.send('bank', '1', p_ordering_key => 'k')",
    "select ulak.send('bank', '1', p_path => 'x')",
    "select ulak.send_with_options('bank', '1')",
    "select ulak.send_batch('bank', '{1}')",
    "select ulak.send_batch_with_priority('bank', '{1}', 3)",
    """select ulak.send_messages('bank', '[{"payload": 1}]')""",
    "select ulak.send_many('{open,bank}', '1')",
]
CHANGE = [
    "select ulak.cancel(%s)",
    "select ulak.reschedule(%s, now())",
    "select ulak.reprioritise(%s, 5)",
    "select * from ulak.explain(%s)",
]
FAR = "8999-01-01"


@pytest.fixture(autouse=True)
def roles(cluster: Cluster, db: DB) -> None:
    for name in ("test_bank", "test_shop"):
        cluster.ensure_login(db, name, member_of="ulak_application")
    for name in ("test_bank_worker", "test_shop_worker"):
        cluster.ensure_login(db, name, member_of="ulak_consumer")
    cluster.ensure_login(db, "test_clerk")
    # What a pooler or PostgREST logs in as: it has no right of its own, and sets the role of its client.
    cluster.ensure_login(db, "test_pool")
    db.execute("alter role test_pool noinherit")
    db.execute("grant test_bank, test_shop, test_bank_worker, test_shop_worker to test_pool")
    for name in ("bank", "open"):
        db.execute("select ulak.create_endpoint(%s, 'pull', '{}')", [name])


@pytest.fixture
def closed(db: DB) -> None:
    db.execute("select ulak.grant_endpoint('bank', 'test_bank', 'send')")


@pytest.fixture
def bank(connect: Connect) -> DB:
    return connect("test_bank")


@pytest.fixture
def shop(connect: Connect) -> DB:
    return connect("test_shop")


def value(db: DB, query: str, *parameters: Any) -> Any:
    row = db.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
    return None if row is None else row[0]


def notices(db: DB) -> list[str]:
    heard: list[str] = []
    db.add_notice_handler(lambda notice: heard.append(str(notice.message_primary)))
    return heard


# An endpoint that another application sends to.


@pytest.mark.parametrize("statement", SEND)
@pytest.mark.usefixtures("closed")
def test_it_cannot_send_to_an_endpoint_that_was_granted_to_another(db: DB, bank: DB, shop: DB, statement: str) -> None:
    denied = refused(shop, statement)

    assert (denied.sqlstate, denied.message_primary) == ("42501", 'endpoint "bank" is not granted to "test_shop"')
    assert "select ulak.grant_endpoint('bank', 'test_shop', 'send');" in str(denied.message_hint)
    assert value(db, "select count(*) from ulak.queue") == 0
    if "p_path" not in statement:
        bank.execute(statement)  # type: ignore[call-overload]
        assert value(db, "select array_agg(distinct sent_by) from ulak.queue") == ["test_bank"]


@pytest.mark.parametrize("statement", CHANGE)
@pytest.mark.usefixtures("closed")
def test_it_cannot_change_nor_explain_what_is_in_it(db: DB, bank: DB, shop: DB, statement: str) -> None:
    id = value(bank, "select ulak.send('bank', '1')")
    before = value(db, "select q::text from ulak.queue q")

    denied = refused(shop, statement, id)

    assert (denied.sqlstate, denied.message_primary) == (
        "42501",
        f'message {id} does not exist, or its endpoint is not granted to "test_shop"',
    )
    assert value(db, "select q::text from ulak.queue q") == before
    bank.execute(statement, [id])  # type: ignore[call-overload]


@pytest.mark.usefixtures("closed")
def test_it_cannot_find_what_is_in_it(db: DB, bank: DB, shop: DB) -> None:
    waiting, done, dead = (value(bank, "select ulak.send('bank', '1')") for _ in range(3))
    db.execute("select ulak.archive_single_to_dlq(%s)", [dead])
    db.execute("select ulak.cancel(%s)", [done])
    mine = value(shop, "select ulak.send('open', '1')")
    ids = "select array_agg(id order by id) from ulak.find_messages()"

    assert value(shop, ids) == [mine]
    assert value(bank, ids) == [waiting, done, dead, mine]
    for id in (waiting, done, dead):
        assert shop.execute("select * from ulak.message_status(%s)", [id]).fetchall() == []
        assert len(bank.execute("select * from ulak.message_status(%s)", [id]).fetchall()) == 1
        assert refused(shop, "select * from ulak.explain(%s)", id).sqlstate == "42501"
    for statement in (
        "select * from ulak.find_messages('bank')",
        "select ulak.cancel_by_key('bank', 'k')",
    ):
        assert refused(shop, statement).message_primary == 'endpoint "bank" is not granted to "test_shop"'


@pytest.mark.usefixtures("closed")
def test_administrators_and_monitors_see_it_all_the_same(bank: DB, connect: Connect) -> None:
    id = value(bank, "select ulak.send('bank', '1')")

    for role in ("ulak_admin", "ulak_monitor"):
        session = connect(role)
        assert value(session, "select sent_by from ulak.find_messages('bank')") == "test_bank"
        assert value(session, "select count(*) from ulak.explain(%s)", id) > 0
    assert value(connect("ulak_admin"), "select ulak.send('bank', '1')") > id


@pytest.mark.usefixtures("closed")
def test_its_event_reaches_the_endpoints_that_it_may_send_to_and_says_so(db: DB, bank: DB, shop: DB) -> None:
    db.execute("select ulak.create_event_type('paid')")
    db.execute("select ulak.subscribe('paid', name) from unnest('{bank,open}'::text[]) name")
    heard = notices(shop)

    assert value(shop, "select ulak.publish('paid', '1')") == 1
    assert value(shop, """select ulak.publish_batch('[{"event_type": "paid", "payload": 2}]')""") == 1

    assert heard == ['1 of 2 messages were not queued: their endpoints are not granted to "test_shop"'] * 2
    query = "select array_agg(distinct e.name) from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id"
    assert value(db, query) == ["open"]
    assert value(bank, "select ulak.publish('paid', '3')") == 2


def test_it_cannot_publish_an_event_type_that_was_granted_to_another(db: DB, bank: DB, shop: DB) -> None:
    db.execute("select ulak.create_event_type('paid'), ulak.subscribe('paid', 'open')")
    assert value(shop, "select ulak.publish('paid', '1')") == 1
    db.execute("select ulak.grant_event_type('paid', 'test_bank')")

    for statement in (
        "select ulak.publish('paid', '1')",
        """select ulak.publish_batch('[{"event_type": "paid", "payload": 2}]')""",
        # A CloudEvent has its type from here.
        """select ulak.send('open', '1', p_metadata => '{"event_type": "paid"}')""",
        """select ulak.send_messages('open', '[{"payload": 1, "metadata": {"event_type": "paid"}}]')""",
    ):
        denied = refused(shop, statement)
        assert (denied.sqlstate, denied.message_primary) == ("42501", 'event type "paid" is not granted to "test_shop"')
        bank.execute(statement)  # type: ignore[call-overload]

    heard = notices(db)
    assert value(db, "select ulak.revoke_event_type('paid', 'test_bank')") is True
    assert heard == ['event type "paid" is open to all of ulak_application again']
    assert value(shop, "select ulak.publish('paid', '1')") == 1


def test_an_endpoint_is_open_to_all_until_the_first_grant_and_after_the_last(db: DB, shop: DB) -> None:
    send = "select ulak.send('bank', '1')"
    heard = notices(db)
    assert value(shop, send)

    assert value(db, "select ulak.grant_endpoint('bank', 'test_bank_worker')") is True
    assert value(shop, send)
    assert value(db, "select ulak.grant_endpoint('bank', 'test_bank', 'send')") is True
    assert value(db, "select ulak.grant_endpoint('bank', 'test_bank', 'send')") is False
    assert refused(shop, send).sqlstate == "42501"
    assert value(db, "select ulak.revoke_endpoint('bank', 'test_bank')") is False
    assert refused(shop, send).sqlstate == "42501"
    assert value(db, "select ulak.revoke_endpoint('bank', 'test_bank', 'send')") is True

    assert heard == ['endpoint "bank" is open to all of ulak_application again']
    assert value(shop, send)


@pytest.mark.usefixtures("closed")
def test_a_grant_to_send_is_none_to_work_off_and_the_other_way_round(db: DB, connect: Connect, bank: DB) -> None:
    """One role may have both, each granted and revoked by itself."""
    db.execute("grant ulak_consumer to test_bank")
    claim = "select count(*) from ulak.claim('w', 10, 'bank')"
    bank.execute("select ulak.send('bank', '1')")

    assert refused(bank, claim).sqlstate == "42501"
    db.execute("select ulak.grant_endpoint('bank', 'test_bank')")
    assert value(bank, claim) == 1
    db.execute("select ulak.revoke_endpoint('bank', 'test_bank')")
    assert refused(bank, claim).sqlstate == "42501"
    assert value(bank, "select ulak.send('bank', '1')")

    assert refused(db, "select ulak.grant_endpoint('bank', 'test_bank', 'read')").sqlstate == "22023"
    db.execute("revoke ulak_consumer from test_bank")


# Idempotency keys.


@pytest.mark.parametrize(
    "statement",
    [
        "select ulak.send('open', to_jsonb(%s), p_idempotency_key => 'pin')",
        "select ulak.send_many('{open}', to_jsonb(%s), p_idempotency_key => 'pin')",
        "select ulak.send_messages('open', jsonb_build_array(jsonb_build_object('payload', %s, 'idempotency_key', 'pin')))",
        "select ulak.publish('pin', to_jsonb(%s), p_idempotency_key => 'pin')",
    ],
)
def test_it_cannot_find_out_a_payload_by_its_idempotency_key(db: DB, bank: DB, shop: DB, statement: str) -> None:
    db.execute("select ulak.create_event_type('pin'), ulak.subscribe('pin', 'open')")
    id = value(bank, "select ulak.send('open', '7', p_idempotency_key => 'pin')")

    told = [refused(shop, statement, guess) for guess in range(10)]

    assert {(each.sqlstate, each.message_primary, each.message_detail, each.message_hint) for each in told} == {
        (
            "23505",
            'idempotency key "pin" was used by another sender',
            'A message of endpoint "open" has this key, and another role than "test_shop" sent it.',
            "Use keys that no other application uses. If one application has several logins, have them set one role.",
        )
    }
    assert value(bank, "select ulak.send('open', '7', p_idempotency_key => 'pin')") == id
    assert "used for another payload" in str(
        refused(bank, "select ulak.send('open', '8', p_idempotency_key => 'pin')").message_primary
    )


def test_logins_that_have_the_senders_rights_share_its_keys(
    db: DB, cluster: Cluster, connect: Connect, bank: DB
) -> None:
    cluster.ensure_login(db, "test_bank_pod", member_of="test_bank")
    send = "select ulak.send('open', '7', p_idempotency_key => 'k')"
    id = value(bank, send)

    pod = connect("test_bank_pod")

    assert value(pod, send) == id
    pod.execute("set role test_bank")
    assert value(pod, send) == id


@pytest.mark.parametrize(
    "statement",
    [
        "select ulak.send('open', '1', p_idempotency_key => 'ulak.schedule nightly 2030-01-01T00:00Z')",
        "select ulak.send_many('{open}', '1', p_idempotency_key => 'ulak.schedule nightly 2030-01-01T00:00Z')",
        "select ulak.send('open', '1', p_path => 'x', p_idempotency_key => 'ulak.x')",
        """select ulak.send_messages('open', '[{"payload": 1, "idempotency_key": "ulak.x"}]')""",
        "select ulak.publish('e', '1', p_idempotency_key => 'ulak.x')",
        """select ulak.publish_batch('[{"event_type": "e", "payload": 1, "idempotency_key": "ulak.x"}]')""",
    ],
)
def test_it_cannot_take_a_key_that_ulak_makes_for_itself(db: DB, shop: DB, statement: str) -> None:
    db.execute("select ulak.create_event_type('e'), ulak.subscribe('e', 'open')")

    assert refused(shop, statement).sqlstate == "42939"
    assert value(db, "select count(*) from ulak.queue") == 0


@pytest.mark.usefixtures("closed")
def test_a_recurring_message_is_sent_whatever_keys_others_have_taken(db: DB, shop: DB, connect: Connect) -> None:
    minute = "2030-01-01T00:00Z"
    db.execute(
        "insert into ulak.recurring (name, cron, endpoint_id, payload, priority) "
        "select case name when 'open' then 'nightly' else 'closed' end, '* * * * *', id, '1', 0 from ulak.endpoints"
    )
    shop.execute("select ulak.send('open', '2', p_idempotency_key => %s)", [f"schedule nightly {minute}"])

    id = value(db, "select ulak_private.send_recurring('nightly', %s)", minute)

    assert value(db, "select payload from ulak.queue where id = %s", id) == 1
    assert value(db, "select ulak_private.send_recurring('nightly', %s)", minute) == id
    assert value(connect("ulak_worker"), "select ulak_private.send_recurring('closed')") > id


# Times.


@pytest.mark.parametrize(
    "statement",
    [
        "select ulak.send('open', '1', p_scheduled_at => %s, p_ordering_key => 'k')",
        "select ulak.send('open', '1', p_scheduled_at => %s)",
        "select ulak.send_many('{open}', '1', p_scheduled_at => %s)",
        "select ulak.send_messages('open', jsonb_build_array(jsonb_build_object('payload', 1, 'scheduled_at', %s::text)))",
        "select ulak.publish('e', '1', p_scheduled_at => %s)",
        "select ulak.publish_batch(jsonb_build_array(jsonb_build_object('event_type', 'e', 'payload', 1, 'scheduled_at', %s::text)))",
        "select ulak.reschedule(1, %s)",
    ],
)
def test_no_message_waits_until_the_year_8999(db: DB, shop: DB, statement: str) -> None:
    db.execute("select ulak.create_event_type('e'), ulak.subscribe('e', 'open')")
    assert value(shop, "select ulak.send('open', '1')") == 1
    in_a_year, later = (value(db, f"select (now() + interval '{days} days')::text") for days in (365, 367))

    for time in (FAR, later):
        denied = refused(shop, statement, time)

        assert denied.sqlstate == "22023"
        assert denied.message_primary == "the message is scheduled further ahead than max_schedule_days"
    assert value(db, "select count(*) from ulak.queue") == 1
    shop.execute(statement, [in_a_year])  # type: ignore[call-overload]
    db.execute("select ulak.configure('max_schedule_days', '400')")
    shop.execute(statement, [later])  # type: ignore[call-overload]


# The role that counts.


def test_a_pooled_session_works_off_what_the_role_that_it_has_set_may(db: DB, connect: Connect) -> None:
    db.execute(
        "select ulak.grant_endpoint('bank', 'test_bank_worker'), ulak.grant_endpoint('open', 'test_shop_worker')"
    )
    db.execute("select ulak.send(name, '1') from unnest('{bank,open}'::text[]) name")
    pool = connect("test_pool")
    claim = "select array_agg(endpoint) from ulak.claim('w', 10)"

    assert refused(pool, claim).sqlstate == "42501"
    pool.execute("set role test_shop_worker")
    assert value(pool, claim) == ["open"]
    assert refused(pool, "select * from ulak.claim('w', 10, 'bank')").sqlstate == "42501"
    id, attempt = 1, 1
    assert refused(pool, "select ulak.complete(%s, 'w', %s)", id, attempt).sqlstate == "42501"
    pool.execute("set role test_bank_worker")
    assert value(pool, claim) == ["bank"]


@pytest.mark.usefixtures("closed")
def test_transactions_of_two_applications_that_share_a_session_keep_apart(db: DB, connect: Connect) -> None:
    """As PgBouncer pools them: a transaction of the one, then one of the other, in the same session."""
    pool = connect("test_pool", autocommit=False)
    send = "select ulak.send('{}', '1', p_idempotency_key => 'k')"

    for turn in range(3):
        for role, endpoint in (("test_bank", "bank"), ("test_shop", "open")):
            pool.execute(f"set local role {role}")  # type: ignore[arg-type]
            pool.execute(send.format(endpoint))  # type: ignore[arg-type]
            pool.commit()
        pool.execute("set local role test_shop")
        assert refused(pool, send.format("bank")).sqlstate == "42501", turn
        pool.rollback()
        # A login that has set no role.
        assert refused(pool, send.format("open")).sqlstate == "42501"
        pool.rollback()

    query = "select e.name, q.sent_by from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id order by q.id"
    assert db.execute(query).fetchall() == [("bank", "test_bank"), ("open", "test_shop")]


def test_set_role_takes_rights_away_also_from_those_who_have_all(db: DB, connect: Connect) -> None:
    """An administrator's clock, and a superuser's way past every grant."""
    later = "select ulak.cancel(1, now() + interval '1 day')"
    db.execute("select ulak.grant_endpoint('bank', 'test_bank', 'send')")
    assert value(db, later) is False

    db.execute("set role test_shop")

    assert refused(db, later).message_primary == "only an administrator may set p_now"
    assert refused(db, "select ulak.send('bank', '1')").sqlstate == "42501"
    db.execute("reset role")
    db.execute("set session authorization test_shop")
    assert refused(db, "select ulak.send('bank', '1')").sqlstate == "42501"


def test_the_log_names_the_role_that_was_set(db: DB) -> None:
    db.execute("select ulak.create_endpoint('third', 'pull', '{}')")
    db.execute("grant ulak_admin to test_clerk")
    db.execute("set role test_clerk")
    db.execute("select ulak.disable_endpoint('third'), ulak.grant_endpoint('third', 'test_shop', 'send')")
    db.execute("select ulak.configure('batch_size', '7')")
    db.execute("reset role")
    db.execute("revoke ulak_admin from test_clerk")

    query = "select array_agg(distinct actor) from ulak.event_log where endpoint_name = 'third' and event <> 'endpoint.created'"
    assert value(db, query) == ["test_clerk"]
    assert value(db, "select granted_by from ulak.endpoint_grants") == "test_clerk"
    assert value(db, "select updated_by from ulak.setting_values") == "test_clerk"


# The sender.


def test_a_message_knows_its_sender_wherever_it_is(db: DB, bank: DB) -> None:
    id = value(bank, "select ulak.send('open', '1')")
    sent_by = "select sent_by from ulak.{} where {} = %s"

    assert value(db, sent_by.format("queue", "id"), id) == "test_bank"
    assert value(bank, "select sent_by from ulak.find_messages('open')") == "test_bank"
    db.execute("select ulak.archive_single_to_dlq(%s)", [id])
    assert value(db, sent_by.format("dlq", "original_message_id"), id) == "test_bank"
    assert value(db, sent_by.format("archive", "id"), id) == "test_bank"
    assert value(bank, "select sent_by from ulak.find_messages('open')") == "test_bank"
    assert value(bank, "select what from ulak.explain(%s)", id) == 'sent by test_bank to endpoint "open"'
    again = value(db, "select ulak.redrive_message(id) from ulak.dlq")
    assert value(db, sent_by.format("messages", "id"), again) == "test_bank"
    db.execute("select ulak.complete(id, 'w', attempt) from ulak.claim('w', 1, 'open')")
    replayed = value(db, "select ulak.replay_message(%s)", again)
    assert value(db, sent_by.format("queue", "id"), replayed) == "test_bank"
    assert value(bank, "select what from ulak.explain(%s) offset 1", replayed).endswith(", first sent by test_bank")


# A trigger.


def test_a_trigger_sends_for_writers_who_may_not(db: DB, bank: DB, connect: Connect) -> None:
    db.execute("grant create on schema public to test_bank")
    bank.execute("create table orders (id bigint)")
    bank.execute("grant insert on orders to test_clerk")
    bank.execute("""
        create function tell() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
        begin
            perform ulak.send('bank', to_jsonb(new));
            return null;
        end
        $$
    """)
    bank.execute("revoke execute on function tell() from public")
    bank.execute("create trigger tell after insert on orders for each row execute function tell()")
    clerk = connect("test_clerk")

    clerk.execute("insert into orders values (1)")

    assert db.execute("select payload, sent_by from ulak.queue").fetchall() == [({"id": 1}, "test_clerk")]
    assert refused(clerk, "select ulak.send('bank', '1')").sqlstate == "42501"
    # Closed to others, it is so for the writers too: the role that counts is theirs.
    db.execute("select ulak.grant_endpoint('bank', 'test_bank', 'send')")
    denied = refused(clerk, "insert into orders values (2)")
    assert denied.message_primary == 'endpoint "bank" is not granted to "test_clerk"'
    assert "select ulak.grant_endpoint('bank', 'test_clerk', 'send');" in str(denied.message_hint)
    assert "trigger" in str(denied.message_hint)
    db.execute("select ulak.grant_endpoint('bank', 'test_clerk', 'send')")
    clerk.execute("insert into orders values (2)")
    assert refused(clerk, "select ulak.send('bank', '1')").sqlstate == "42501"
    assert value(db, "select count(*) from ulak.queue") == 2
