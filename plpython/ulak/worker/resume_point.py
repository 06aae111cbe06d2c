"""Where the last claim ended, so that the next one can begin there.

What was claimed stays in the index until vacuum removes it, and a claim walks over it. Usually that is little. When
another session keeps vacuum from its work it is much, and then a claim that knows where to begin needn't. It sees no
other endpoint and no message that fell due before that place, so it must not be the rule: the more time was lost, the
longer the next claims begin there, and never longer than to make the loss a small one.
"""

from __future__ import annotations

from typing import NamedTuple

from ulak.worker.tuning import (
    CLAIM_SECONDS,
    MESSAGE_SECONDS,
    RESUME_LONGEST,
    RESUME_ONE_IN,
    RESUME_PARTS,
    TELLING_CLAIM,
)


class Place(NamedTuple):
    """An entry of the index of pending messages."""

    endpoint_id: int
    priority: int
    due_at: str
    id: int


class ResumePoint:
    def __init__(self) -> None:
        self._place: Place | None = None
        self._until = 0.0
        # Of a message in a claim that resumed.
        self._seconds = MESSAGE_SECONDS
        self._telling = 0

    def place(self, endpoint_id: int, now: float) -> Place | None:
        """Where to begin; None: at the beginning."""
        if self._place is None or self._place.endpoint_id != endpoint_id:
            return None
        return self._place if now < self._until or self._telling >= RESUME_ONE_IN else None

    def claimed(self, now: float, began: float, count: int, is_full: bool, place: Place | None) -> None:
        """After a claim that got so many, all of one endpoint and priority if there is a place; is_full: it
        began at the beginning."""
        self._place = place
        self._telling = self._telling + 1 if is_full and place is not None and count >= TELLING_CLAIM else 0
        if is_full:
            lost = now - began - CLAIM_SECONDS - count * self._seconds
            self._until = now + min(RESUME_LONGEST, max(0.0, lost) * RESUME_PARTS)
        elif count >= TELLING_CLAIM:
            self._seconds += ((now - began) / count - self._seconds) / 4
