"""The value of a Retry-After header in seconds from now."""

from __future__ import annotations

import re
from datetime import UTC

MAX = 86400
_DIGITS = re.compile(r"[0-9]+")


def seconds(value: str, now: float) -> int | None:
    """From 0 to a day, given as seconds or as an HTTP date. None for anything else: the usual backoff applies."""
    value = value.strip()
    if _DIGITS.fullmatch(value):
        # Never convert a long number: int() of many digits is slow.
        return min(int(value[-19:]) if len(value.lstrip("0")) <= 19 else MAX, MAX)
    # Python's parser accepts a lot that isn't a date.
    if len(value) > 64 or not value[:1].isalpha():
        return None
    # Imported here: most workers never see a date, and it loads a dozen modules.
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        delay = moment.timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # Rounded up, so that the retry isn't too early.
    return int(min(max(-(-delay // 1), 0), MAX))
