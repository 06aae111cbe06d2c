"""Is an exchange a delivery, worth another try, or hopeless: the prefix that the database decides by."""

from __future__ import annotations

import re

from ulak import response, retry_after
from ulak.model import Endpoint, Finished, Outcome

RETRYABLE = "[RETRYABLE]"
PERMANENT = "[PERMANENT]"
DISABLE = "[DISABLE]"

# Of 4xx these ask for another try: request timeout, too early, too many requests.
_RETRYABLE_4XX = frozenset((408, 425, 429))
DELIVERED = Outcome(status=200)
_EXCERPT = 200
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\s]+")


def judge(endpoint: Endpoint, finished: Finished, now: float) -> Outcome:
    status = finished.status
    if finished.kind is None and 200 <= status < 300:
        if not endpoint.profile.capture_response:
            return DELIVERED if status == 200 else Outcome(status=status)
        return Outcome(status=status, response=response.capture(finished))
    captured = response.capture(finished) if endpoint.profile.capture_response and status else None
    # A refusal is a refusal, even if the rest of the answer never came. A success isn't one until it is complete.
    if status >= 300:
        error = f"{_prefix(endpoint, status)} HTTP {status}{_excerpt(finished)}"
        return Outcome(error, _delay(finished, now), captured, status)
    # An address that policy forbids stays forbidden, however often it is tried.
    prefix = PERMANENT if finished.kind == "blocked" else RETRYABLE
    text = finished.error or "no answer"
    return Outcome(f"{prefix} {finished.kind or 'network'}: {_clean(text)}", None, captured, status)


def _prefix(endpoint: Endpoint, status: int) -> str:
    exact, group = str(status), f"{status // 100}xx"
    # A status that is named wins over its class.
    for name in (exact, group):
        if name in endpoint.retry_on:
            return RETRYABLE
        if name in endpoint.permanent_on:
            return PERMANENT
    if status == 410:
        return DISABLE
    # A redirect isn't followed, and the receiver will send it again.
    if 300 <= status < 500 and status not in _RETRYABLE_4XX:
        return PERMANENT
    return RETRYABLE


def _delay(finished: Finished, now: float) -> int | None:
    if finished.status not in (429, 503):
        return None
    values = [value for name, value in response.headers(finished) if name == "retry-after"]
    return retry_after.seconds(values[-1], now) if values else None


def _excerpt(finished: Finished) -> str:
    text = _clean(finished.body[: 4 * _EXCERPT].decode("utf-8", "replace"))
    if not text:
        return ""
    return ": " + (text if len(text) <= _EXCERPT else text[:_EXCERPT] + "...")


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).strip()
