"""Masks secret values in texts, in every encoding in which they may appear."""

from __future__ import annotations

import functools
import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import quote, quote_plus

MASK = "****"
# Shorter values protect nothing, and masking them would garble ordinary words.
SHORTEST = 4

_SECRET_NAMES = ("api-key", "apikey", "authenticat", "authoriz", "cookie", "password", "secret", "signature", "token")
_PERCENT = re.compile(r"%[0-9A-F]{2}")


@functools.lru_cache(maxsize=1024)
def is_secret_header(name: str) -> bool:
    """Whether a header holds a credential or a signature, judged by its name (lower case)."""
    return any(part in name for part in _SECRET_NAMES)


class Mask:
    """Masks values, also encoded as in URLs, JSON, HTML and base64."""

    __slots__ = ("_forms", "_values")

    def __init__(self, values: Iterable[str] | Callable[[], Iterable[str]] = ()) -> None:
        """The values, or a function that finds them when the first text is masked: most endpoints never fail."""
        self._values = values
        self._forms: Sequence[str] | None = None

    def hide(self, given: str, others: Iterable[str] = (), is_cut: bool = False) -> str:
        """The text with these values and the others masked. A text that was cut may end within one of them."""
        if self._forms is None:
            values = self._values() if callable(self._values) else self._values
            known = {value for value in values if len(value) >= SHORTEST}
            self._forms = sorted({form for value in known for form in _forms(value) if len(form) >= SHORTEST})
        forms = [*self._forms, *(each for each in others if len(each) >= SHORTEST)]
        hidden: list[tuple[int, int]] = []
        for form in forms:
            start = given.find(form)
            while start >= 0:
                hidden.append((start, start + len(form)))
                start = given.find(form, start + 1)
        if is_cut:
            tail = max((_overlap(given, form) for form in forms), default=0)
            if tail:
                hidden.append((len(given) - tail, len(given)))
        return _without(given, hidden)


def _forms(value: str) -> Iterator[str]:
    raw = value.encode("utf-8", "replace")
    yield value
    for encoded in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield encoded
        yield _PERCENT.sub(lambda match: match[0].lower(), encoded)
    for escaped in (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
        yield escaped
        yield escaped.replace("/", "\\/")
    yield html.escape(value)
    yield html.escape(value, quote=False)
    yield b64encode(raw).decode().rstrip("=")
    yield urlsafe_b64encode(raw).decode().rstrip("=")
    # Headers are read as Latin-1.
    yield raw.decode("latin-1")


def _overlap(given: str, form: str) -> int:
    """The length of the longest beginning of the form at the end of the text."""
    for length in range(min(len(form) - 1, len(given)), SHORTEST - 1, -1):
        if given.endswith(form[:length]):
            return length
    return 0


def _without(given: str, hidden: list[tuple[int, int]]) -> str:
    if not hidden:
        return given
    kept: list[str] = []
    end = 0
    for start, stop in sorted(hidden):
        # Values that overlap or touch are masked as one.
        if start > end or not kept:
            kept += (given[end:start], MASK)
        end = max(end, stop)
    return "".join(kept) + given[end:]
