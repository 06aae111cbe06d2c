"""Settings: defaults, ranges, overrides of a session, and which role may change what."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused

DB = psycopg.Connection[Any]


def value(db: DB, name: str) -> str:
    row = db.execute("select ulak.setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])


def test_a_setting_has_its_default_until_it_is_changed(db: DB) -> None:
    rows = db.execute("select name, value, default_value, ulak.setting(name) from ulak.settings").fetchall()

    assert len(rows) > 25
    assert [row for row in rows if not row[1] == row[2] == row[3]] == []


def test_every_default_is_valid(db: DB) -> None:
    query = "select name, ulak_private.checked_setting(name, default_value, 'none') = default_value from ulak.settings"

    assert [name for name, holds in db.execute(query).fetchall() if not holds] == []


def test_a_changed_setting_holds_until_it_is_reset(db: DB) -> None:
    assert db.execute("select ulak.configure('batch_size', ' 0250 ')").fetchone() == ("250",)
    assert value(db, "batch_size") == "250"
    assert db.execute("select value, default_value from ulak.settings where name = 'batch_size'").fetchone() == (
        "250",
        "500",
    )

    assert db.execute("select ulak.configure('batch_size', null)").fetchone() == ("500",)
    assert value(db, "batch_size") == "500"


def test_a_change_is_logged_with_old_and_new_value(db: DB) -> None:
    db.execute("select ulak.configure('workers', '4')")
    db.execute("select ulak.configure('workers', '4')")
    db.execute("select ulak.configure('workers', null)")

    log = db.execute("select event, old_value, new_value, detail, actor from ulak.event_log order by id").fetchall()

    assert log == [
        ("setting.changed", "2", "4", {"setting": "workers"}, "postgres"),
        ("setting.changed", "4", "2", {"setting": "workers"}, "postgres"),
    ]


OUT_OF_RANGE = [
    ("circuit_breaker_cooldown", "4"),
    ("circuit_breaker_cooldown", "3601"),
    ("circuit_breaker_cooldown", ""),
    ("circuit_breaker_cooldown", "1e2"),
    ("max_queue_size", "-1"),
    ("max_queue_size", "99999999999999999999"),
    ("capture_response", "perhaps"),
    ("circuit_breaker_counts", "some"),
    ("http_allowed_networks", "10.0.0.0/8,example.com"),
    ("http_allowed_networks", "10.0.0.1/8"),
    ("cloudevents_source", ""),
    ("cloudevents_source", "a b"),
]


def test_a_value_out_of_range_is_refused(db: DB) -> None:
    for name, bad in OUT_OF_RANGE:
        before = value(db, name)

        error = refused(db, "select ulak.configure(%s, %s)", name, bad)

        assert error.sqlstate == "22023", (name, bad)
        assert value(db, name) == before
        assert error.message_hint is not None
        assert error.message_hint.startswith("select ulak.configure(")
        db.execute(error.message_hint.encode())


def test_an_address_with_a_mask_is_answered_with_its_network(db: DB) -> None:
    error = refused(db, "select ulak.configure('http_allowed_networks', '127.0.0.1/8, 10.1.2.3/24')")

    assert error.message_hint == "select ulak.configure('http_allowed_networks', '127.0.0.0/8,10.1.2.0/24');"


def test_the_error_names_range_unit_and_default(db: DB) -> None:
    error = refused(db, "select ulak.configure('circuit_breaker_cooldown', '4')")

    assert (
        error.message_detail
        == "circuit_breaker_cooldown takes an integer from 5 to 3600, in seconds, or a duration such as 5 min (default 30)."
    )


def test_booleans_choices_and_networks_are_stored_in_one_form(db: DB) -> None:
    cases = [
        ("capture_response", "ON", "true"),
        ("capture_response", "0", "false"),
        ("circuit_breaker_counts", "All", "all"),
        ("http_allowed_networks", "10.0.0.0/8, fd00::/8", "10.0.0.0/8,fd00::/8"),
        ("http_allowed_networks", "", ""),
    ]

    for name, given, stored in cases:
        assert db.execute("select ulak.configure(%s, %s)", [name, given]).fetchone() == (stored,)
        assert value(db, name) == stored


def test_an_unknown_name_is_answered_with_the_nearest(db: DB) -> None:
    for statement in ("select ulak.setting('max_que_size')", "select ulak.configure('max_que_size', '5')"):
        error = refused(db, statement)

        assert error.sqlstate == "42704"
        assert error.message_hint == 'Did you mean "max_queue_size"?'


@pytest.mark.parametrize("role", ["ulak_admin", "ulak_application", "ulak_monitor", "ulak_worker", None])
def test_a_parameter_of_the_server_has_no_effect(connect: Connect, role: str | None) -> None:
    session = connect(role) if role else connect()
    session.execute("set ulak.max_queue_size = '3'")
    session.execute("set ulak.max_payload_size = 'nonsense'")

    assert value(session, "max_queue_size") == "1000000"
    assert value(session, "max_payload_size") == "1048576"


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("circuit_breaker_cooldown", "30s", "30"),
        ("circuit_breaker_cooldown", "5 min", "300"),
        ("priority_aging", "1 d", "86400"),
        ("priority_aging", "1h 30min", "5400"),
        ("poll_interval", "200ms", "200"),
        ("poll_interval", "1.5 s", "1500"),
        ("dlq_retention_days", "2 weeks", "14"),
        ("archive_retention_months", "1 year", "12"),
    ],
)
def test_a_duration_may_have_a_unit(db: DB, name: str, given: str, stored: str) -> None:
    assert db.execute("select ulak.configure(%s, %s)", [name, given]).fetchone() == (stored,)
    assert value(db, name) == stored


def test_every_setting_that_is_a_duration_takes_one(db: DB) -> None:
    query = "select name, minimum, unit from ulak.settings where unit in ('milliseconds', 'seconds', 'days', 'months')"
    settings = db.execute(query).fetchall()  # type: ignore[arg-type]

    for name, minimum, unit in settings:
        assert db.execute("select ulak.configure(%s, %s)", [name, f"{minimum} {unit}"]).fetchone() == (str(minimum),)
    assert len(settings) >= 17


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("circuit_breaker_cooldown", "1500 ms"),
        ("circuit_breaker_cooldown", "1 month"),
        ("circuit_breaker_cooldown", "2 h"),
        ("circuit_breaker_cooldown", "soon"),
        ("circuit_breaker_cooldown", "-30 s"),
        ("circuit_breaker_cooldown", "999999999999999 years"),
        ("dlq_retention_days", "36 h"),
        ("dlq_retention_days", "1 month"),
        ("archive_retention_months", "30 days"),
        ("batch_size", "30 s"),
    ],
)
def test_a_duration_that_is_no_whole_number_of_the_unit_or_out_of_range_is_refused(
    db: DB, name: str, given: str
) -> None:
    assert refused(db, f"select ulak.configure('{name}', '{given}')").sqlstate == "22023"


def test_only_an_administrator_configures(connect: Connect) -> None:
    for role in ("ulak_application", "ulak_monitor", "ulak_worker"):
        assert refused(connect(role), "select ulak.configure('batch_size', '1')").sqlstate == "42501"

    assert connect("ulak_admin").execute("select ulak.configure('batch_size', '1')").fetchone() == ("1",)


def test_a_new_queue_limit_holds_for_the_next_send(db: DB) -> None:
    db.execute("select ulak.create_endpoint('a', 'pull', '{}')")
    db.execute("select ulak.send('a', '1')")

    db.execute("select ulak.configure('max_queue_size', '1')")

    assert refused(db, "select ulak.send('a', '2')").sqlstate == "53400"
    db.execute("select ulak.configure('max_queue_size', null)")
    db.execute("select ulak.send('a', '2')")


def test_the_nearest_name_is_found_by_edits_and_by_parts(db: DB) -> None:
    known = ["url", "method", "headers", "timeout", "connect_timeout", "signing_secret", "max_in_flight"]
    cases = {
        "ulr": "url",
        "URL": "url",
        "header": "headers",
        "timout": "timeout",
        "conect_timeout": "connect_timeout",
        "secret": "signing_secret",
        "in_flight": "max_in_flight",
        "xyz": None,
        "": None,
        "quite something else": None,
    }

    for wanted, expected in cases.items():
        assert db.execute("select ulak_private.nearest(%s, %s)", [wanted, known]).fetchone() == (expected,), wanted


def test_edit_distance_is_a_metric_with_swaps(db: DB) -> None:
    cases = [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("ab", "ba", 1)]

    for one, other, distance in cases:
        assert db.execute("select ulak_private.edit_distance(%s, %s)", [one, other]).fetchone() == (distance,)
