"""The value of a Retry-After header in seconds from now."""

from __future__ import annotations

import re
from datetime import UTC

MAX = 86400
_DIGITS = re.compile(r"[0-9]+")


def seconds(value: str, now: float) -> int | None:
    """Seconds or an HTTP date, from 0 to a day; None for anything else, so that the usual backoff holds."""
    value = value.strip()
    if _DIGITS.fullmatch(value):
        # The cap is reached long before int() of so many digits gets slow.
        return min(int(value[-19:]) if len(value.lstrip("0")) <= 19 else MAX, MAX)
    # Python's parser accepts much that no server means as a date.
    if len(value) > 64 or not value[:1].isalpha():
        return None
    # Here, because most workers never meet a date, and it brings a dozen modules.
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        delay = moment.timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # Rounded up: not a moment before the date.
    return int(min(max(-(-delay // 1), 0), MAX))
