"""Judges an exchange: delivered, to be retried, or failed for good. The database decides by the error's prefix."""

from __future__ import annotations

from collections.abc import Sequence

from ulak.messages.delivery import DELIVERED, DISABLE, MESSAGE, PERMANENT, RETRYABLE
from ulak.safety import text
from ulak.transports.http import multistatus, response, retry_after, secrecy
from ulak.transports.http.model import Endpoint, Finished, Message, Outcome

# 4xx that are retried: request timeout, too early, too many requests.
_RETRYABLE_4XX = frozenset((408, 425, 429))
_EXCERPT = 200
_MULTI_STATUS = 207
# At most this many different errors are quoted: masking payloads in each takes time.
_MOST_QUOTED = 10
# The last characters of a cut answer aren't quoted: a quotation of the message might be cut, too, and go unnoticed.
_UNSURE = 64


def judge(endpoint: Endpoint, finished: Finished, now: float, messages: Sequence[Message] = ()) -> Outcome:
    """`messages`: the answer to a batch may say which of them failed."""
    status = finished.status
    if finished.kind is None and 200 <= status < 300:
        if status == _MULTI_STATUS and endpoint.batch_size > 1:
            return _judge_apart(endpoint, finished, messages)
        if not endpoint.profile.capture_response:
            return DELIVERED if status == 200 else Outcome(status=status)
        return Outcome(status=status, response=response.capture(endpoint, finished, len(messages)))
    captured = None
    if endpoint.profile.capture_response and status:
        captured = response.capture(endpoint, finished, len(messages))
    # A refusal counts even if the rest of the answer never came; a success must be complete.
    if status >= 300:
        error = f"{_prefix(endpoint, status)} HTTP {status}{_excerpt(endpoint, finished)}"
        return Outcome(error, _delay(finished, now), captured, status)
    if _is_own_timeout(endpoint, finished):
        return failed(endpoint, RETRYABLE, f"{MESSAGE} its own time-out ended the request: {finished.error}", captured)
    # Retrying doesn't help: a forbidden address stays forbidden.
    prefix = PERMANENT if finished.kind == "blocked" else RETRYABLE
    return failed(endpoint, prefix, f"{finished.kind or 'network'}: {finished.error or 'no answer'}", captured, status)


def _judge_apart(endpoint: Endpoint, finished: Finished, messages: Sequence[Message]) -> Outcome:
    """A 207 means that some messages failed. If its body can't be understood, all of them are sent again."""
    captured = response.capture(endpoint, finished, len(messages)) if endpoint.profile.capture_response else None
    try:
        refused = multistatus.parse(finished.body, messages)
    except ValueError as reason:
        told = f"{RETRYABLE} HTTP {finished.status} that doesn't tell which messages failed: {reason}"
        return Outcome(told, None, captured, finished.status)
    quoted: dict[str, str] = {}
    failures = {}
    for each in refused:
        if each.error not in quoted:
            quoted[each.error] = _quote(endpoint, finished, each.error) if len(quoted) < _MOST_QUOTED else ""
        prefix = PERMANENT if each.is_permanent else RETRYABLE
        error = f"{prefix} HTTP {finished.status}{quoted[each.error]}"
        failures[each.message.id] = Outcome(error, None, captured, finished.status)
    return Outcome(None, None, captured, finished.status, failures or None)


def failed(endpoint: Endpoint, prefix: str, error: str, captured: str | None = None, status: int = 0) -> Outcome:
    """A failure, with everything private masked in its text."""
    return Outcome(f"{prefix} {text.line(endpoint.private.hide(error))}", None, captured, status)


def _is_own_timeout(endpoint: Endpoint, finished: Finished) -> bool:
    """Whether the message's own time-out has ended the request, and not one of the endpoint's."""
    own = finished.request.profile.timeout
    return finished.kind == "timeout" and own < endpoint.profile.timeout and (finished.seconds or 0) >= own


def _prefix(endpoint: Endpoint, status: int) -> str:
    exact, group = str(status), f"{status // 100}xx"
    # An exact status wins over its class.
    for name in (exact, group):
        if name in endpoint.retry_on:
            return RETRYABLE
        if name in endpoint.permanent_on:
            return PERMANENT
    if status == 410:
        return DISABLE
    # Redirects aren't followed, and the receiver would send the same one again.
    if 300 <= status < 500 and status not in _RETRYABLE_4XX:
        return PERMANENT
    return RETRYABLE


def _delay(finished: Finished, now: float) -> int | None:
    if finished.status not in (429, 503):
        return None
    values = [value for name, value in response.headers(finished) if name == "retry-after"]
    return retry_after.seconds(values[-1], now) if values else None


def _excerpt(endpoint: Endpoint, finished: Finished) -> str:
    """The beginning of the answer, with secrets and payloads masked: not every role that sees errors may see those."""
    if not finished.body:
        return ""
    kept = finished.body[: 4 * _EXCERPT]
    is_cut = finished.truncated or len(kept) < len(finished.body) or len(kept) >= endpoint.profile.keep_body
    return _quote(endpoint, finished, kept.decode("utf-8", "replace"), is_cut)


def _quote(endpoint: Endpoint, finished: Finished, answer: str, is_cut: bool = False) -> str:
    request = finished.request
    # The endpoint's own credentials are masked anyway.
    own = list(
        secrecy.credentials([each for each in request.headers if each not in endpoint.lines], endpoint.signature)
    )
    own += secrecy.own_path(request, endpoint.profile.url)
    answer = endpoint.private.hide(answer, own, is_cut)
    answer = secrecy.hide_payload(text.line(answer), request, endpoint.lines, endpoint.profile.url)
    if is_cut:
        answer = answer[:-_UNSURE]
    return f": {text.line(answer, _EXCERPT)}" if answer else ""
