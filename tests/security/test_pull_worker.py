"""What an external worker must not be able to do: it gets the endpoints that were granted to it, and nothing else."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.errors import refused
from ulak.safety import text

DB = psycopg.Connection[Any]

UNBEARABLE = [
    *(
        "\x01",
        "\x1b",
        "\x7f",
        "\x85",
        "\x9b",
        "\xad",
        "\u061c",
        "\u180e",
        "\u200b",
        "\u202e",
        "\u2028",
        "\u2060",
        "\u2069",
    ),
    *("\ufdd0", "\ufeff", "\ufffb", "\ufffe", "\uffff", "\U0001ffff", "\U000e0041", "\U0010fffe"),
]
CLAIM = "select endpoint, payload from ulak.claim('mine', 10)"


@pytest.fixture
def consumer(db: DB, connect: Connect) -> DB:
    """A member of ulak_consumer that was granted one of three endpoints."""
    for name in ("mine", "other", "third"):
        db.execute("select ulak.create_endpoint(%s, 'pull', '{}')", [name])
        db.execute("select ulak.send(%s, to_jsonb(%s::text))", [name, f"for {name}"])
    db.execute("select ulak.create_endpoint('web', 'http', '{\"url\": \"https://example.com\"}')")
    db.execute("select ulak.send('web', '1')")
    db.execute("select ulak.grant_endpoint('mine', 'test_ulak_consumer')")
    return connect("ulak_consumer")


def snapshot(db: DB) -> list[tuple[Any, ...]]:
    return db.execute("select q::text from ulak.queue q order by id").fetchall()


def test_a_claim_finds_what_was_granted_only(db: DB, consumer: DB) -> None:
    assert consumer.execute(CLAIM).fetchall() == [("mine", "for mine")]
    assert consumer.execute(CLAIM).fetchall() == []
    assert db.execute("select count(*) from ulak.queue where status = 'pending'").fetchone() == (3,)


def test_a_claim_of_another_endpoint_says_no_more_than_one_of_none(db: DB, consumer: DB) -> None:
    before = snapshot(db)

    for name in ("other", "web", "nothing of this name"):
        denied = refused(consumer, "select * from ulak.claim('mine', 1, %s)", name)
        assert (denied.sqlstate, denied.message_primary) == (
            "42501",
            f'endpoint "{name}" is not granted to "test_ulak_consumer"',
        )

    assert snapshot(db) == before


REPORTS_OF_ONE = [
    "select ulak.heartbeat(%s, %s, %s)",
    "select ulak.complete(%s, %s, %s)",
    "select ulak.fail(%s, %s, %s, 'no')",
    "select ulak.release(%s, %s, %s)",
]
REPORTS_OF_MANY = [
    "select is_held from ulak.heartbeat_many(p_ids => array[%s::bigint], p_worker => %s, p_attempts => array[%s::integer])",
    "select is_settled from ulak.complete_many(p_ids => array[%s::bigint], p_worker => %s, p_attempts => array[%s::integer])",
    "select is_settled from ulak.fail_many(p_ids => array[%s::bigint], p_worker => %s, p_attempts => array[%s::integer], "
    "p_errors => '{no}')",
    "select is_settled from ulak.release_many(p_ids => array[%s::bigint], p_worker => %s, p_attempts => array[%s::integer])",
    "select outcome from ulak.work(p_ids => array[%s::bigint], p_worker => %s, p_attempts => array[%s::integer], p_limit => 0)",
]


def answer(consumer: DB, report: str, id: int, worker: str, attempt: int) -> Any:
    """Rows, or all that an error says, without the id."""
    try:
        return consumer.execute(report, [id, worker, attempt]).fetchall()
    except psycopg.Error as error:
        said = (error.diag.message_primary, error.diag.message_detail, error.diag.message_hint)
        return error.sqlstate, *(str(text).replace(str(id), "ID") for text in said)


@pytest.mark.parametrize("report", REPORTS_OF_ONE + REPORTS_OF_MANY)
def test_a_message_of_another_endpoint_is_to_it_as_one_that_does_not_exist(db: DB, consumer: DB, report: str) -> None:
    claim = "select id, attempt from ulak.claim('theirs', 1, %s)"
    in_flight, attempt = db.execute(claim, ["other"]).fetchone() or ()
    done, _ = db.execute(claim, ["third"]).fetchone() or ()
    db.execute("select ulak.complete(%s, 'theirs', 1)", [done])
    before = snapshot(db)

    unknown = answer(consumer, report, 987654321, "theirs", 1)

    assert unknown in ([(False,)], [("lost",)]) or unknown[0] == "42501"
    assert answer(consumer, report, in_flight, "theirs", attempt) == unknown
    assert answer(consumer, report, done, "theirs", 1) == unknown
    assert snapshot(db) == before


@pytest.mark.parametrize("report", REPORTS_OF_MANY)
def test_a_message_of_another_endpoint_among_its_own_holds_up_none_of_them(db: DB, consumer: DB, report: str) -> None:
    theirs, _ = db.execute("select id, attempt from ulak.claim('w', 1, 'other')").fetchone() or ()
    mine, _ = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()
    both = (
        report.replace("array[%s::bigint]", f"array[{theirs}, %s]")
        .replace("array[%s::integer]", "array[1, %s]")
        .replace("{no}", "{no,no}")
    )

    answers = consumer.execute(both, [mine, "w", 1]).fetchall()

    assert answers in ([(False,), (True,)], [("lost",)])
    assert db.execute("select locked_by from ulak.queue where id = %s", [theirs]).fetchone() == ("w",)


def test_it_settles_what_it_was_granted(db: DB, consumer: DB) -> None:
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    assert consumer.execute("select ulak.heartbeat(%s, 'w', %s)", [id, attempt]).fetchone() == (True,)
    consumer.execute("select ulak.complete(%s, 'w', %s)", [id, attempt])

    assert db.execute("select status from ulak.messages where id = %s", [id]).fetchone() == ("completed",)


def test_what_is_revoked_is_lost_at_once(db: DB, consumer: DB) -> None:
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    assert db.execute("select ulak.revoke_endpoint('mine', 'test_ulak_consumer')").fetchone() == (True,)

    assert refused(consumer, "select ulak.complete(%s, 'w', %s)", id, attempt).sqlstate == "42501"
    assert consumer.execute(CLAIM).fetchall() == []
    assert db.execute("select ulak.revoke_endpoint('mine', 'test_ulak_consumer')").fetchone() == (False,)


def test_members_of_a_granted_role_may_and_a_claim_spans_all_that_was_granted(db: DB, consumer: DB) -> None:
    db.execute("select ulak.grant_endpoint('other', 'ulak_consumer'), ulak.grant_endpoint('web', 'ulak_consumer')")
    db.execute(
        "select ulak.send_batch('mine', array['1', '2']::jsonb[]), ulak.send_batch('other', array['1', '2']::jsonb[])"
    )

    few = consumer.execute("select endpoint from ulak.claim('w', 4)").fetchall()
    rest = consumer.execute("select endpoint from ulak.claim('w', 10)").fetchall()

    assert (len(few), len(rest)) == (4, 2)
    # http endpoints are the worker's in the database, unless one is asked for by name.
    assert {name for (name,) in few + rest} == {"mine", "other"}
    assert consumer.execute("select endpoint from ulak.claim('w', 10, 'web')").fetchall() == [("web",)]


def test_what_a_dead_worker_held_is_taken_over_by_a_session_that_was_granted_the_endpoint_later(
    db: DB, consumer: DB
) -> None:
    db.execute("select ulak.grant_endpoint('other', 'test_ulak_consumer')")
    db.execute("select ulak.claim('dead', 1, 'third')")
    db.execute(
        "update ulak_private.deliveries set lease_until = clock_timestamp() - interval '10 s' where locked_by = 'dead'"
    )
    assert len(consumer.execute(CLAIM).fetchall()) == 2

    db.execute("select ulak.grant_endpoint('third', 'test_ulak_consumer')")

    assert consumer.execute(CLAIM).fetchall() == [("third", "for third")]


def test_a_consumer_without_a_grant_gets_nothing(db: DB, connect: Connect) -> None:
    db.execute("select ulak.create_endpoint('other', 'pull', '{}'), ulak.send('other', '1')")

    assert connect("ulak_consumer").execute(CLAIM).fetchall() == []


def test_the_grant_of_a_dropped_role_does_no_harm(db: DB, consumer: DB) -> None:
    db.execute("create role test_passing")
    db.execute("select ulak.grant_endpoint('mine', 'test_passing')")
    db.execute("drop role test_passing")

    assert consumer.execute(CLAIM).fetchall() == [("mine", "for mine")]


def test_grants_are_logged_and_end_with_the_endpoint(db: DB) -> None:
    db.execute("select ulak.create_endpoint('short', 'pull', '{}')")
    assert db.execute("select ulak.grant_endpoint('short', 'ulak_consumer')").fetchone() == (True,)
    assert db.execute("select ulak.grant_endpoint('short', 'ulak_consumer')").fetchone() == (False,)
    db.execute("select ulak.revoke_endpoint('short', 'ulak_consumer')")
    db.execute("select ulak.grant_endpoint('short', 'ulak_consumer')")
    db.execute("select ulak.drop_endpoint('short')")

    query = "select event, detail ->> 'role' from ulak.event_log where event ~ 'granted|revoked' order by id"
    assert db.execute(query).fetchall() == [
        ("endpoint.granted", "ulak_consumer"),
        ("endpoint.revoked", "ulak_consumer"),
        ("endpoint.granted", "ulak_consumer"),
    ]
    assert db.execute("select count(*) from ulak.endpoint_grants").fetchone() == (0,)


def test_only_what_exists_can_be_granted(db: DB, connect: Connect) -> None:
    db.execute("select ulak.create_endpoint('mine', 'pull', '{}')")

    assert refused(db, "select ulak.grant_endpoint('min', 'ulak_consumer')").message_hint == 'Did you mean "mine"?'
    assert refused(db, "select ulak.grant_endpoint('mine', 'no_such_role')").sqlstate == "42704"
    assert refused(db, "select ulak.grant_endpoint('mine', null)").sqlstate == "42704"
    for role in ("ulak_consumer", "ulak_worker", "ulak_application", "ulak_monitor"):
        assert refused(connect(role), "select ulak.grant_endpoint('mine', 'nobody')").sqlstate == "42501"


def test_it_cannot_claim_what_isnt_due_by_a_clock_of_its_own(db: DB, consumer: DB) -> None:
    consumer.execute(CLAIM)
    db.execute("select ulak.send('mine', '2', p_scheduled_at => now() + interval '1 hour')")
    db.execute("select ulak.send('mine', '3', p_scheduled_at => now() + interval '50 seconds')")

    denied = refused(consumer, "select * from ulak.claim('mine', 10, 'mine', p_now => now() + interval '2 hours')")

    assert (denied.sqlstate, denied.message_primary) == ("42501", "only an administrator may set p_now")
    query = "select count(*) from ulak.claim('mine', 10, 'mine', p_now => now() + interval '55 seconds')"
    assert consumer.execute(query).fetchone() == (0,)


def test_it_reads_no_secret_and_runs_no_maintenance(consumer: DB) -> None:
    for statement in (
        "select * from ulak_private.endpoint_configs(array[1])",
        "select * from ulak_private.secrets",
        "select * from ulak.queue",
        "select * from ulak.endpoints",
        "select * from ulak_private.maintenance_step('idempotency_keys', now(), now(), now())",
        "select ulak.recover_stale_messages()",
        "call ulak.run_maintenance()",
        "select * from ulak_private.claim('w', 10)",
    ):
        assert refused(consumer, statement).sqlstate == "42501"


# Each number is a few bytes in jsonb, and 131,072 digits as text.
VAST = "[" + ",".join(["1e131071"] * 9000) + "]"


@pytest.mark.parametrize(
    "response",
    [VAST, "[" * 3000 + "]" * 3000, '"' + "x" * 2_000_000 + '"', "[" + ",".join(["1e131071"] * 9) + "]"],
    ids=["vast", "deep", "long", "digits"],
)
def test_an_unreadable_response_is_left_out_and_its_message_completed(db: DB, consumer: DB, response: str) -> None:
    """As text it would be beyond a gigabyte, or nested too deep: pg_dump and every query that shows it would fail."""
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    consumer.execute("select ulak.complete(%s, 'w', %s, %s::jsonb)", [id, attempt, response])

    query = "select status, response from ulak.messages where id = %s"
    assert db.execute(query, [id]).fetchone() == ("completed", {"truncated": True})


def test_a_response_of_a_usual_size_is_kept(db: DB, consumer: DB) -> None:
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    consumer.execute("select ulak.complete(%s, 'w', %s, %s::jsonb)", [id, attempt, '{"text": "' + "x" * 100_000 + '"}'])

    query = "select length(response ->> 'text') from ulak.messages where id = %s"
    assert db.execute(query, [id]).fetchone() == (100_000,)


def test_an_error_is_one_line_of_bounded_length(db: DB, consumer: DB) -> None:
    """It is shown by every reporting function, and kept with each failed cycle."""
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    consumer.execute(
        "select ulak.fail(%s, 'w', %s, E'one\\n\\ttwo\\u001b[31m' || repeat('x', 10000000))", [id, attempt]
    )

    (error,) = db.execute("select last_error from ulak.messages where id = %s", [id]).fetchone() or ("",)
    assert error.startswith("[RETRYABLE] one two [31mxxx")
    assert error.endswith("x...")
    assert len(error) < 1100


def test_a_reason_is_kept_in_the_workers_own_words(db: DB, consumer: DB) -> None:
    """Monitors read it, as README says."""
    consumer.execute("select ulak.complete(id, 'mine', attempt) from ulak.claim('mine')")
    db.execute("select ulak.send('mine', %s)", [Jsonb({"name": "Ada Lovelace", "order": 4711})])
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    consumer.execute("select ulak.fail(%s, 'w', %s, 'order 4711: no customer Ada Lovelace')", [id, attempt])

    (error,) = db.execute("select last_error from ulak.messages where id = %s", [id]).fetchone() or ("",)
    assert error == "[RETRYABLE] order 4711: no customer Ada Lovelace"


SECRET = "hush" * 1500


@pytest.mark.parametrize("report", ["fail", "fail_many", "work"])
@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("no entry with hush-token", "[RETRYABLE] no entry with ****"),
        ("[PERMANENT] HUSH-TOKEN is wrong, hush-token", "[PERMANENT] **** is wrong, ****"),
        ("x" * 995 + "hush-token", "[RETRYABLE] " + "x" * 995 + "****"),
        (f"the key is {SECRET}", "[RETRYABLE] the key is ****"),
        ("***= is no pattern", "[RETRYABLE] ***= is no pattern"),
        ("a token of another endpoint: other-token", "[RETRYABLE] a token of another endpoint: other-token"),
    ],
)
def test_its_reasons_show_no_secret_that_its_endpoint_names(
    db: DB, consumer: DB, report: str, reason: str, kept: str
) -> None:
    for name, value in (("token", "hush-token"), ("key", SECRET), ("other", "other-token"), ("short", "no")):
        db.execute("select ulak.set_secret(%s, %s)", [name, value])
    for endpoint, headers in (("named", ("token", "key", "short")), ("foreign", ("other",))):
        config = {"url": "https://example.com", "headers": {f"x-{name}": {"$secret": name} for name in headers}}
        db.execute(
            "select ulak.create_endpoint(%s, 'http', %s), ulak.send(%s, '1')", [endpoint, Jsonb(config), endpoint]
        )
    db.execute("select ulak.grant_endpoint('named', 'test_ulak_consumer')")
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'named')").fetchone() or ()
    # Nobody can try the secrets of others by reporting their messages, too.
    (foreign,) = db.execute("select id from ulak.claim('w', 1, 'foreign')").fetchone() or ()

    if report == "fail":
        consumer.execute("select ulak.fail(%s, 'w', %s, %s)", [id, attempt, reason])
    else:
        call = {
            "fail_many": "select ulak.fail_many('w', %s, %s, %s)",
            "work": "select ulak.work('w', 0, p_ids => %s, p_attempts => %s, p_errors => %s)",
        }
        consumer.execute(call[report], [[id, foreign], [attempt, 1], [reason, reason]])

    assert db.execute("select last_error from ulak.messages where id = %s", [id]).fetchone() == (kept,)


@pytest.mark.parametrize("character", UNBEARABLE)
def test_its_errors_hold_nothing_that_xml_or_a_terminal_cannot_bear(db: DB, consumer: DB, character: str) -> None:
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'mine')").fetchone() or ()

    consumer.execute("select ulak.fail(%s, 'w', %s, %s)", [id, attempt, f"one{character}two \u20ac \U0001f4a5"])

    (error,) = db.execute("select last_error from ulak.messages where id = %s", [id]).fetchone() or ("",)
    assert error == "[RETRYABLE] one two \u20ac \U0001f4a5"
    assert text.line(f"one{character}two \u20ac \U0001f4a5") == "one two \u20ac \U0001f4a5"


def test_a_worker_has_no_name_of_any_length(db: DB, consumer: DB) -> None:
    before = snapshot(db)

    assert refused(consumer, "select * from ulak.claim(repeat('w', 513))").sqlstate == "22023"

    assert snapshot(db) == before


def test_its_errors_are_no_advice_to_open_the_network(db: DB, consumer: DB) -> None:
    """doctor() tells administrators what to run: where the worker in the database met a blocked address."""
    db.execute("select ulak.grant_endpoint('web', 'test_ulak_consumer')")
    (id, attempt) = consumer.execute("select id, attempt from ulak.claim('w', 1, 'web')").fetchone() or ()
    error = (
        "[PERMANENT] blocked: address 8.8.8.8 is blocked; to allow it: "
        "select ulak.configure('http_allowed_networks', '0.0.0.0/0');"
    )

    consumer.execute("select ulak.fail(%s, 'w', %s, %s)", [id, attempt, error])

    fixes = db.execute("select finding, fix from ulak.doctor() where \"check\" = 'failing'").fetchall()
    assert len(fixes) == 1
    assert "0.0.0.0/0" not in fixes[0][1]
