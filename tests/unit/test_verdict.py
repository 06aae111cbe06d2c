"""Delivered, [RETRYABLE], [PERMANENT] or [DISABLE]."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ulak.transports.http import verdict
from ulak.transports.http.model import Endpoint, Finished, Request, Settings

NOW = 784111777


def finished(endpoint: Endpoint, status: int = 0, kind: str | None = None, **fields: Any) -> Finished:
    return Finished(Request(endpoint.profile, [], b""), status, kind, **fields)


def prefix(endpoint: Endpoint, status: int) -> str | None:
    error = verdict.judge(endpoint, finished(endpoint, status), NOW).error
    return error and error.split()[0]


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_2xx_is_delivered(make_endpoint: Any, status: int) -> None:
    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), status), NOW)

    assert outcome.error is None
    assert outcome.status == status


@pytest.mark.parametrize(
    ("status", "expected"),
    [(status, "[RETRYABLE]") for status in (408, 425, 429, 500, 502, 503, 504, 599, 600, 999)]
    + [(status, "[PERMANENT]") for status in (300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 409, 413, 422, 451)]
    + [(410, "[DISABLE]")],
)
def test_a_status_is_classified_as_documented(make_endpoint: Any, status: int, expected: str) -> None:
    assert prefix(make_endpoint(), status) == expected


def test_an_endpoint_can_move_statuses_and_classes(make_endpoint: Any) -> None:
    endpoint = make_endpoint(retry_on=[404, "3xx", 410], permanent_on=["5xx", 429])

    assert prefix(endpoint, 404) == "[RETRYABLE]"
    assert prefix(endpoint, 302) == "[RETRYABLE]"
    assert prefix(endpoint, 410) == "[RETRYABLE]"
    assert prefix(endpoint, 503) == "[PERMANENT]"
    assert prefix(endpoint, 429) == "[PERMANENT]"
    assert prefix(endpoint, 400) == "[PERMANENT]"


def test_a_named_status_wins_over_its_class(make_endpoint: Any) -> None:
    endpoint = make_endpoint(retry_on=["4xx"], permanent_on=[404])

    assert prefix(endpoint, 404) == "[PERMANENT]"
    assert prefix(endpoint, 422) == "[RETRYABLE]"


@pytest.mark.parametrize("kind", ["timeout", "resolve", "connect", "tls", "network", "config"])
def test_a_failure_without_an_answer_is_retryable(make_endpoint: Any, kind: str) -> None:
    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), 0, kind, error="it\nbroke"), NOW)

    assert outcome.error == f"[RETRYABLE] {kind}: it broke"


def test_a_blocked_address_is_permanent(make_endpoint: Any) -> None:
    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), 0, "blocked", error="address 10.0.0.1"), NOW)

    assert outcome.error == "[PERMANENT] blocked: address 10.0.0.1"


def test_a_success_that_broke_off_is_no_success(make_endpoint: Any) -> None:
    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), 200, "network", error="closed"), NOW)

    assert outcome.error == "[RETRYABLE] network: closed"


def test_a_refusal_that_broke_off_is_still_a_refusal(make_endpoint: Any) -> None:
    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), 422, "network", error="closed"), NOW)

    assert outcome.error == "[PERMANENT] HTTP 422"


@pytest.mark.parametrize(("status", "expected"), [(429, 7), (503, 7), (500, None), (408, None), (301, None)])
def test_retry_after_counts_for_429_and_503_only(make_endpoint: Any, status: int, expected: int | None) -> None:
    headers = (b"HTTP/1.1 503 x\r\n", b"Retry-AFTER: 7\r\n", b"\r\n")

    outcome = verdict.judge(make_endpoint(), finished(make_endpoint(), status, headers=headers), NOW)

    assert outcome.retry_after == expected


def test_the_error_quotes_a_short_and_printable_part_of_the_body(make_endpoint: Any) -> None:
    body = b"no\x00\xff such\r\n\tthing" + b"!" * 1000

    error = verdict.judge(make_endpoint(), finished(make_endpoint(), 404, body=body), NOW).error

    assert error is not None
    assert error.startswith("[PERMANENT] HTTP 404: no \ufffd such thing!!!")
    assert len(error) < 300
    assert error.isprintable()


def test_a_response_is_kept_only_when_asked_for(make_endpoint: Any) -> None:
    capturing = make_endpoint(settings=Settings(capture_response=True))

    assert verdict.judge(make_endpoint(), finished(make_endpoint(), 200, body=b"ok"), NOW).response is None
    kept = verdict.judge(capturing, finished(capturing, 200, body=b"ok"), NOW).response
    assert kept is not None
    assert json.loads(kept)["body"] == "ok"
