"""Secrets: named by configs, never shown, rotated with a grace period."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.errors import refused
from support.sessions import Running, wait_until_blocked

DB = psycopg.Connection[Any]

URL = "https://example.com/hook"
NOW = datetime(2031, 3, 15, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def create(db: DB, name: str, **config: Any) -> None:
    db.execute("select ulak.create_endpoint(%s, 'http', %s)", [name, json.dumps({"url": URL, **config})])


def resolved(db: DB, name: str, now: datetime = NOW) -> tuple[dict[str, Any], list[str]]:
    row = db.execute(
        """
        select c.config, c.signing_secrets
        from ulak.endpoints e, ulak_private.endpoint_configs(array[e.id], %s) c
        where e.name = %s
        """,
        [now, name],
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def version(db: DB, name: str) -> int:
    row = db.execute("select config_version from ulak.endpoints where name = %s", [name]).fetchone()
    assert row is not None
    return int(row[0])


def test_a_secret_can_stand_wherever_a_text_may(db: DB) -> None:
    db.execute("select ulak.set_secret('one', 'first')")
    db.execute("select ulak.set_secret('two', 'https://id.example.com/token')")
    create(
        db,
        "a",
        headers={"X-A": {"$secret": "one"}, "X-B": "plain"},
        auth={
            "type": "oauth2",
            "token_url": {"$secret": "two"},
            "client_id": "me",
            "client_secret": {"$secret": "one"},
        },
        retry_on=[500],
    )

    config, signing = resolved(db, "a")

    assert config == {
        "url": URL,
        "headers": {"X-A": "first", "X-B": "plain"},
        "auth": {
            "type": "oauth2",
            "token_url": "https://id.example.com/token",
            "client_id": "me",
            "client_secret": "first",
        },
        "retry_on": [500],
    }
    assert signing == []


def test_configs_are_given_for_the_endpoints_asked_for(db: DB) -> None:
    create(db, "a")
    create(db, "b", timeout=7)
    create(db, "c")

    rows = db.execute(
        "select id, name, config_version, config from ulak_private.endpoint_configs('{2,3,99}') order by id"
    ).fetchall()

    assert rows == [(2, "b", 1, {"url": URL, "timeout": 7}), (3, "c", 1, {"url": URL})]


def test_an_unknown_secret_is_answered_with_the_nearest(db: DB) -> None:
    db.execute("select ulak.set_secret('billing-key', 'x')")

    for statement in (
        """select ulak.create_endpoint('a', 'http', '{"url": "http://x", "headers": {"X": {"$secret": "biling-key"}}}')""",
        "select ulak.drop_secret('biling-key')",
    ):
        error = refused(db, statement)

        assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "billing-key"?')


def test_a_malformed_reference_is_refused(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'x')")

    malformed: list[Any] = [{"$secret": 1}, {"$secret": "s", "x": "y"}, {"$secret": None}, {"$secret": {}}]

    for reference in malformed:
        for config in ({"headers": {"X-A": reference}}, {"headers": reference}):
            error = refused(db, "select ulak.create_endpoint('a', 'http', %s)", json.dumps({"url": URL, **config}))
            assert error.sqlstate in ("22023", "42704"), reference


def test_what_the_claim_reads_must_not_be_secret(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'second')")

    config = json.dumps({"url": URL, "rate_limit": {"limit": 1, "interval": {"$secret": "s"}}})
    error = refused(db, "select ulak.create_endpoint('a', 'http', %s)", config)

    assert error.message_primary is not None
    assert error.message_primary.endswith("$.rate_limit.interval must not be a secret")


def test_a_config_is_checked_with_its_secrets_put_in(db: DB) -> None:
    db.execute("select ulak.set_secret('s', E'line\\nHost: evil')")

    config = json.dumps({"url": URL, "headers": {"X-A": {"$secret": "s"}}})
    error = refused(db, "select ulak.create_endpoint('a', 'http', %s)", config)

    assert error.message_primary is not None
    assert "$.headers.X-A must not have line breaks" in error.message_primary
    assert "evil" not in f"{error.message_primary} {error.message_detail} {error.message_hint} {error.context}"


def test_a_new_value_is_checked_against_the_configs_that_name_it(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'good')")
    create(db, "a", headers={"X-A": {"$secret": "s"}})

    assert refused(db, "select ulak.set_secret('s', E'bad\\r\\n')").sqlstate == "22023"

    assert resolved(db, "a")[0]["headers"] == {"X-A": "good"}


def test_a_new_value_raises_the_version_of_the_configs_that_name_it(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'one')")
    create(db, "names it", headers={"X-A": {"$secret": "s"}})
    create(db, "names it too", auth={"type": "bearer", "token": {"$secret": "s"}})
    create(db, "does not", headers={"X-A": "s"})

    db.execute("select ulak.set_secret('s', 'two')")

    assert [version(db, name) for name in ("names it", "names it too", "does not")] == [2, 2, 1]
    assert resolved(db, "names it too")[0]["auth"]["token"] == "two"


def test_a_secret_needs_a_plain_name_and_a_value(db: DB) -> None:
    for name, value in [("", "x"), ("a b", "x"), (None, "x"), ("x" * 201, "x"), ("a", ""), ("a", None)]:
        assert refused(db, "select ulak.set_secret(%s, %s)", name, value).sqlstate == "22023"


def test_a_secret_in_use_is_not_dropped(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'x')")
    create(db, "b", headers={"X-A": {"$secret": "s"}})
    create(db, "a", headers={"X-A": {"$secret": "s"}})

    error = refused(db, "select ulak.drop_secret('s')")

    assert (error.sqlstate, error.message_detail) == ("55006", "It is named by the config of: a, b.")
    db.execute("select ulak.alter_endpoint(name, %s) from ulak.endpoints", [json.dumps({"url": URL})])
    assert db.execute("select ulak.drop_secret('s')").fetchone() == (True,)


def test_a_drop_waits_for_a_config_that_is_about_to_name_the_secret(connect: Connect, db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'x')")
    create(db, "a")
    for statement in (
        """select ulak.alter_endpoint('a', '{"url": "http://x", "headers": {"X": {"$secret": "s"}}}')""",
        """update ulak.endpoints set config = '{"url": "http://x", "headers": {"Y": {"$secret": "s"}}}'""",
    ):
        writer, dropper = connect(autocommit=False), connect()
        writer.execute(statement.encode())

        dropping = Running(partial(dropper.execute, "select ulak.drop_secret('s')"))
        wait_until_blocked(dropper, db)
        writer.commit()

        with pytest.raises(psycopg.errors.ObjectInUse):
            dropping.result()


def test_rotation_signs_with_both_secrets_until_the_grace_is_over(db: DB) -> None:
    old = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    create(db, "a", signing_secret=old)

    row = db.execute("select ulak.rotate_secret('a', '1 day', p_now => %s)", [NOW]).fetchone()

    assert row is not None
    new = row[0]
    assert resolved(db, "a", NOW)[1] == [new, old]
    assert resolved(db, "a", NOW + DAY - timedelta(seconds=1))[1] == [new, old]
    assert resolved(db, "a", NOW + DAY)[1] == [new]
    assert resolved(db, "a")[0]["signing_secret"] == new
    assert version(db, "a") == 2


def test_a_generated_secret_is_256_bits_in_standard_form(db: DB) -> None:
    create(db, "a")

    secrets = [db.execute("select ulak.rotate_secret('a')").fetchone()[0] for _ in range(2)]  # type: ignore[index]

    assert secrets[0] != secrets[1]
    for secret in secrets:
        assert secret.startswith("whsec_")
        assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32


def test_rotation_moves_a_literal_secret_out_of_the_config(db: DB) -> None:
    create(db, "a", signing_secret="literally this")

    db.execute("select ulak.rotate_secret('a')")

    row = db.execute("select config from ulak.endpoints").fetchone()
    assert row == ({"url": URL, "signing_secret": {"$secret": "ulak/endpoint/1/signing_secret"}},)


def test_an_endpoint_without_a_signing_secret_gets_its_first(db: DB) -> None:
    create(db, "a")

    row = db.execute("select ulak.rotate_secret('a', p_new_secret => 'chosen secret', p_now => %s)", [NOW]).fetchone()

    assert row == ("chosen secret",)
    assert resolved(db, "a")[1] == ["chosen secret"]


REPLACED = {
    "alter_endpoint": "select ulak.alter_endpoint('a', %s)",
    "create_endpoint": "select ulak.create_endpoint('a', 'http', %s, p_if_exists => 'replace')",
    "update": "update ulak.endpoints set config = %s where name = 'a'",
}
OWN = {"$secret": "ulak/endpoint/1/signing_secret"}


@pytest.mark.parametrize("way", REPLACED)
def test_what_rotation_made_stays_when_the_config_is_replaced(db: DB, way: str) -> None:
    create(db, "a")
    db.execute("select ulak.rotate_secret('a', p_new_secret => 'chosen secret', p_now => %s)", [NOW])

    db.execute(REPLACED[way], [Jsonb({"url": URL, "timeout": 8})])  # type: ignore[arg-type]

    assert db.execute("select config from ulak.endpoints").fetchone() == (
        {"url": URL, "timeout": 8, "signing_secret": OWN},
    )
    assert resolved(db, "a")[1] == ["chosen secret"]


@pytest.mark.parametrize("way", [*REPLACED, "merge"])
def test_what_rotation_made_goes_when_a_config_says_so_by_name(db: DB, way: str) -> None:
    create(db, "a")
    db.execute("select ulak.rotate_secret('a')")
    statement = {**REPLACED, "merge": "select ulak.alter_endpoint('a', p_merge => %s)"}[way]

    db.execute(statement, [Jsonb({"url": URL, "signing_secret": None})])  # type: ignore[arg-type]

    assert db.execute("select config from ulak.endpoints").fetchone() == ({"url": URL},)
    assert db.execute("select count(*) from ulak_private.secrets").fetchone() == (0,)


def test_another_signing_secret_takes_the_place_of_what_rotation_made(db: DB) -> None:
    create(db, "a")
    db.execute("select ulak.rotate_secret('a')")

    db.execute(REPLACED["alter_endpoint"], [Jsonb({"url": URL, "signing_secret": "literally this"})])

    assert resolved(db, "a")[1] == ["literally this"]


def test_a_named_secret_is_rotated_for_all_that_name_it(db: DB) -> None:
    db.execute("select ulak.set_secret('shared', 'the old one')")
    create(db, "a", signing_secret={"$secret": "shared"})
    create(db, "b", signing_secret={"$secret": "shared"})

    db.execute("select ulak.rotate_secret('a', '1 day', 'the new one', %s)", [NOW])

    assert resolved(db, "a")[1] == resolved(db, "b")[1] == ["the new one", "the old one"]
    assert (version(db, "a"), version(db, "b")) == (2, 2)


def test_without_grace_the_old_secret_signs_no_more(db: DB) -> None:
    create(db, "a", signing_secret="the old one")

    db.execute("select ulak.rotate_secret('a', '0', 'the new one', %s)", [NOW])

    assert resolved(db, "a")[1] == ["the new one"]


def test_setting_a_secret_ends_a_rotation(db: DB) -> None:
    create(db, "a", signing_secret="the old one")
    db.execute("select ulak.rotate_secret('a', '1 day', 'the new one', %s)", [NOW])

    db.execute("select ulak.set_secret('ulak/endpoint/1/signing_secret', 'the third one')")

    assert resolved(db, "a")[1] == ["the third one"]


def test_a_rotation_that_is_not_valid_changes_nothing(db: DB) -> None:
    create(db, "a", signing_secret="the old one")
    db.execute("select ulak.create_endpoint('p', 'pull', '{}')")

    for statement in (
        "select ulak.rotate_secret('a', p_new_secret => 'short')",
        "select ulak.rotate_secret('a', p_new_secret => 'whsec_short')",
        "select ulak.rotate_secret('a', '-1 day')",
        "select ulak.rotate_secret('a', null)",
        "select ulak.rotate_secret('p')",
    ):
        assert refused(db, statement).sqlstate == "22023"

    assert resolved(db, "a") == ({"url": URL, "signing_secret": "the old one"}, ["the old one"])
    assert db.execute("select count(*) from ulak_private.secrets").fetchone() == (0,)


def test_an_old_secret_is_forgotten_after_its_grace(db: DB) -> None:
    create(db, "a", signing_secret="the old one")
    db.execute("select ulak.rotate_secret('a', '1 day', 'the new one', %s)", [NOW])
    forget = "select ulak_private.forget_old_secrets(%s)"

    assert db.execute(forget, [NOW]).fetchone() == (0,)
    assert db.execute(forget, [NOW + DAY]).fetchone() == (1,)
    assert db.execute(forget, [NOW + DAY]).fetchone() == (0,)

    assert db.execute("select value, previous_value, previous_until from ulak_private.secrets").fetchone() == (
        "the new one",
        None,
        None,
    )
    assert version(db, "a") == 3


def test_no_role_can_read_the_secrets(connect: Connect, db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'x')")

    for role in ("ulak_admin", "ulak_application", "ulak_monitor", "ulak_worker"):
        session = connect(role)
        assert refused(session, "select * from ulak_private.secrets").sqlstate == "42501"
        if role != "ulak_worker":
            assert refused(session, "select ulak_private.endpoint_configs('{1}')").sqlstate == "42501"
        if role != "ulak_admin":
            assert refused(session, "select ulak.set_secret('s', 'y')").sqlstate == "42501"
            assert refused(session, "select ulak.rotate_secret('a')").sqlstate == "42501"


def test_an_administrator_sets_names_and_rotates_without_reading(connect: Connect) -> None:
    admin = connect("ulak_admin")
    admin.execute("select ulak.set_secret('s', 'hunter2')")
    create(admin, "a", headers={"X-A": {"$secret": "s"}}, signing_secret="hunter2hunter2")
    admin.execute("select ulak.rotate_secret('a')")

    shown = [
        admin.execute(query).fetchall()
        for query in (
            "select * from ulak.endpoints",
            "select * from ulak.endpoint_list",
            "select * from ulak.event_log",
        )
    ]

    assert "hunter2" not in str(shown)


def test_the_log_tells_what_was_done_and_never_a_value(db: DB) -> None:
    db.execute("select ulak.set_secret('s', 'hunter2')")
    create(db, "a", signing_secret="hunter2hunter2")
    db.execute("select ulak.rotate_secret('a', '1 hour', 'hunter2hunter3')")
    db.execute("select ulak.drop_secret('s')")

    rows = db.execute("select event, detail, old_value, new_value from ulak.event_log order by id").fetchall()

    assert [row[0] for row in rows] == [
        "secret.set",
        "endpoint.created",
        "endpoint.altered",
        "secret.rotated",
        "secret.dropped",
    ]
    assert "hunter2" not in str(rows)
