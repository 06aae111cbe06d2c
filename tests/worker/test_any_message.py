"""Whatever a message holds, it harms only itself: arbitrary messages at the limits of send(), through every protocol and format.

Each message ends as delivered or as a dead letter by its own fault, and its neighbours are delivered at their first attempt. A short game in `make test`,
the same each time; a long one in `make chaos`, another each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import brokers
from support.machine import IS_LONG
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import SETTLED, Site, WorkerSession

# Any failure that counts opens the circuit, and then the neighbours wait.
TOUCHY = {"circuit_breaker": {"threshold": 1, "counts": "all"}}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "signed": {
        "signing_secret": "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=",
        "signature": {"scheme": "hmac", "header": "x-signature"},
    },
    "sigv4": {
        "auth": {"type": "aws_sigv4", "access_key": "a", "secret_key": "b", "region": "eu-west-1", "service": "sqs"}
    },
    "batch": {"batch_size": 10},
    "envelope": {"batch_size": 10, "batch_format": "envelope"},
    "binary": {"cloudevents": True},
    "structured": {"cloudevents": True, "cloudevents_mode": "structured"},
    "event-batch": {"cloudevents": True, "batch_size": 10},
}
SEND = """
    select ulak.send(%(endpoint)s, p_payload => %(payload)s, p_raw => %(raw)s, p_headers => %(headers)s, p_metadata => %(metadata)s,
        p_ordering_key => %(ordering_key)s, p_idempotency_key => %(idempotency_key)s, p_content_type => %(content_type)s, p_path => %(path)s)
"""
OUTCOMES = """
    select q.id, q.status, q.attempts, q.last_error, e.name, e.circuit_state
    from ulak.messages q join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = any (%s)
"""

# JSON as text, so that numbers may be what Python doesn't have.
odd = st.sampled_from(
    [
        "\ufffe",
        "\uffff",
        "\x01",
        "\x1f",
        "\x7f",
        "\x85",
        "\u2028",
        "\u202e",
        "\U0001f600",
        "\ufeff",
        "{",
        "}",
        "/",
        "+",
        "#",
        "\n",
        "\r",
    ]
)
letters = st.one_of(odd, st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
texts = st.one_of(
    st.text(letters, max_size=20),
    st.integers(1, 70_000).map(lambda size: "x" * size),
    st.sampled_from(["é" * 40_000, ""]),
)
numbers = st.one_of(
    st.integers().map(str),
    st.sampled_from(
        ["1e4300", "1e4400", "-1e4400", "1e-4400", "1e100000", "0.1e1", "-0", "1E400", "9" * 5000, "9" * 100_000]
    ),
)


def quoted(text: str) -> str:
    # As escapes, which jsonb turns into characters.
    return '"' + "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else _escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2))


names = st.one_of(
    st.text(letters, min_size=1, max_size=10), st.sampled_from(["event_type", "place", "data", "n", "id"])
)
scalars = st.one_of(texts.map(quoted), numbers, st.sampled_from(["true", "false", "null"]))


def listed(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, max_size=4).map(lambda found: "[" + ",".join(found) + "]")


def keyed(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(names.map(quoted), values), max_size=4)
    return pairs.map(lambda found: "{" + ",".join(f"{name}:{value}" for name, value in found) + "}")


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


documents = st.one_of(
    st.recursive(scalars, lambda inner: st.one_of(listed(inner), keyed(inner)), max_leaves=8),
    st.integers(1, 110).map(nested),
    st.integers(1, 110).map(lambda depth: "[" * depth + "]" * depth),
    st.sampled_from(['"\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"']),
    st.sampled_from(['"' + "x" * 1_000_000 + '"', '{"event_type": 1e4400}', '{"event_type": "' + "é" * 300 + '"}']),
)
objects = st.one_of(keyed(documents), documents)
header_names = st.one_of(names, st.sampled_from(["x-own", "traceparent", "CC", "BCC", "content-type", "x" * 300]))
headers = st.dictionaries(header_names, texts, max_size=4).map(
    lambda found: "{" + ",".join(f"{quoted(name)}:{quoted(value)}" for name, value in found.items()) + "}"
)


class Sent(NamedTuple):
    payload: str | None = "{}"
    raw: str | None = None
    headers: str | None = None
    metadata: str | None = None
    ordering_key: str | None = None
    idempotency_key: str | None = None
    content_type: str | None = None
    path: str | None = None


PATHS = ["a", "a//b", "?a=%ff", "%ff/%c3%28", "a/" + "b" * 2000, "[", ":", "a?b?c", ";", "@", "'\"", "~*()"]
ODD: dict[str, st.SearchStrategy[str]] = {
    "payload": documents,
    "raw": texts,
    "headers": headers,
    "metadata": objects,
    "ordering_key": texts,
    "idempotency_key": texts,
    "content_type": st.sampled_from(["application/json", "text/plain", "application/x+json; charset=utf-8"]),
    "path": st.sampled_from(PATHS),
}


@st.composite
def messages(draw: st.DrawFn) -> Sent:
    """With one or two fields that are odd: send() refuses most of those with more."""
    fields = {name: draw(ODD[name]) for name in draw(st.sets(st.sampled_from(list(ODD)), min_size=1, max_size=2))}
    return Sent(**({"payload": None} if "raw" in fields and "payload" not in fields else {}), **fields)


class Place:
    """Endpoints of every protocol and format, and a worker that delivers."""

    def __init__(self, site: Site, worker: WorkerSession, endpoints: list[str]) -> None:
        self.site = site
        self.worker = worker
        self.endpoints = endpoints
        self.application = site.connect("ulak_application")
        self.keys = 0

    def send(self, endpoint: str, sent: Sent) -> int | None:
        """None if send() refuses it, for a reason that the caller can mend."""
        if sent.idempotency_key:
            # Each key is used once, also when a game is played again.
            self.keys += 1
            sent = sent._replace(idempotency_key=f"{self.keys} {sent.idempotency_key}")
        try:
            row = self.application.execute(SEND, {"endpoint": endpoint, **sent._asdict()}).fetchone()
        except psycopg.Error as error:
            assert error.sqlstate is not None and error.sqlstate[:2] in ("22", "42", "54"), error
            return None
        except ValueError:
            # A text that psycopg can't write.
            return None
        assert row is not None
        return int(row[0])

    def neighbour(self, endpoint: str) -> int:
        row = self.application.execute(
            'select ulak.send(%s, \'{}\', p_metadata => \'{"place": "b", "event_type": "c"}\')', [endpoint]
        ).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def place(site: Site, receiver: Receiver, request: pytest.FixtureRequest) -> Iterator[Place]:
    endpoints = [*FORMATS, "log"]
    site.configure(capture_response=True)
    with ExitStack() as resources:
        for name, config in FORMATS.items():
            site.http(name, receiver.url, **TOUCHY, **config)
        site.endpoint("log", {"max_bytes": 100, **TOUCHY}, protocol="log")
        for protocol in brokers.PROTOCOLS:
            broker = brokers.broker(protocol, request.getfixturevalue, resources)
            kept = str(broker.config[broker.route])
            kinds: dict[str, dict[str, Any]] = {"": {}}
            if protocol != "redis":
                kinds |= {
                    "-binary": {"cloudevents": True},
                    "-structured": {"cloudevents": True, "cloudevents_mode": "structured"},
                }
            if protocol in ("redis", "amqp"):
                kinds["-routed"] = {broker.route: kept + "{place}"}
            for kind, config in kinds.items():
                site.endpoint(protocol + kind, {**broker.config, **TOUCHY, **config}, protocol=protocol)
                endpoints.append(protocol + kind)
        place = Place(site, site.start(seconds=3600), endpoints)
        yield place
        place.application.close()


def test_whatever_a_message_holds_it_harms_only_itself(place: Place) -> None:
    @settings(
        max_examples=1000 if IS_LONG else 25,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if IS_LONG else [Phase.generate],
    )
    @given(st.lists(st.tuples(st.sampled_from(place.endpoints), messages()), min_size=5, max_size=25))
    def play(game: list[tuple[str, Sent]]) -> None:
        ids = {id: sent for endpoint, sent in game if (id := place.send(endpoint, sent)) is not None}
        neighbours = [place.neighbour(endpoint) for endpoint in place.endpoints]

        wait_until(lambda: place.worker.call.is_done() or place.site.value(SETTLED), "an empty queue")

        assert not place.worker.call.is_done()
        outcomes = {row["id"]: row for row in place.site.rows(OUTCOMES, [*ids, *neighbours])}
        assert {row["circuit_state"] for row in outcomes.values()} <= {"closed"}, outcomes
        for id in neighbours:
            assert (outcomes[id]["status"], outcomes[id]["attempts"]) == ("completed", 1), outcomes[id]
        for id in ids:
            row = outcomes[id]
            assert row["attempts"] == 1, row
            assert row["status"] == "completed" or str(row["last_error"]).startswith("[PERMANENT] "), row

    play()
