"""Settings as the database returns them."""

from __future__ import annotations

import pytest
from support import stage
from ulak.safety import address
from ulak.transports.http.model import Settings
from ulak.worker import options
from ulak.worker.held import Held

SETTINGS = stage.SETTINGS | {
    "capture_response": "true",
    "cloudevents_source": "/shop",
    "http_allowed_networks": "10.0.0.0/8,127.0.0.1",
    "worker_concurrency": "1000",
}


def test_texts_become_what_they_mean() -> None:
    chosen = options.parse(SETTINGS, max_files=-1)

    assert (chosen.slots, chosen.batch_size, chosen.lease) == (1143, 500, 30)
    assert (chosen.poll_interval, chosen.poll_interval_busy, chosen.turn_interval) == (0.05, 0.002, 0.005)


def test_those_of_http_too() -> None:
    guard = address.guard(SETTINGS)
    defaults = Settings.of(SETTINGS, "1.2")

    assert guard.blocked_by("10.1.2.3") is None
    assert guard.blocked_by("127.0.0.1") is None
    assert guard.blocked_by("127.0.0.2") == "loopback, 127.0.0.0/8"
    assert defaults.capture_response
    assert (defaults.user_agent, defaults.cloudevents_source) == ("ulak/1.2", "/shop")


@pytest.mark.parametrize(("max_files", "slots"), [(1024, 412), (100_000, 1143), (64, 2)])
def test_there_are_no_more_requests_than_the_process_may_have_sockets(max_files: int, slots: int) -> None:
    assert options.parse(SETTINGS, max_files).slots == slots


def test_a_limit_is_reported_with_its_reason() -> None:
    assert options.parse(SETTINGS, 100_000).limited_by is None
    assert options.parse(SETTINGS, 64).limited_by == (
        "a process may have 64 files open, which is enough for 2 requests in flight; worker_concurrency asks for 1000"
    )


@pytest.mark.parametrize("concurrency", [1, 2, 7, 16, 128, 1000])
def test_an_endpoint_can_have_as_many_requests_as_the_setting_says(concurrency: int) -> None:
    chosen = options.parse({**SETTINGS, "worker_concurrency": str(concurrency)}, max_files=-1)

    assert Held(chosen.slots).room_of(None) == concurrency
