"""Where the last claim ended, so that the next one can begin there.

What was claimed leaves dead entries in the index until vacuum removes them, and a claim walks over them. Usually they
are few. Where another session keeps vacuum from its work they are many, and a claim that begins where the last one
ended passes them by. Such a claim sees no other endpoint, and no message that fell due before that place. So it is not
the rule: after a claim that lost time by walking, the next ones resume for RESUME_PARTS times as long, and never for
longer than RESUME_LONGEST.
"""

from __future__ import annotations

from typing import NamedTuple

from ulak.worker.tuning import (
    CLAIM_SECONDS,
    MEASURED_CLAIM,
    MESSAGE_SECONDS,
    RESUME_LONGEST,
    RESUME_ONE_IN,
    RESUME_PARTS,
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
        # What a message costs in a claim that walks over nothing: measured by claims that resumed.
        self._seconds = MESSAGE_SECONDS
        # Large claims in a row that began at the beginning.
        self._unmeasured = 0

    def place(self, endpoint_id: int, now: float) -> Place | None:
        """Where to begin; None: at the beginning."""
        if self._place is None or self._place.endpoint_id != endpoint_id:
            return None
        return self._place if now < self._until or self._unmeasured >= RESUME_ONE_IN else None

    def claimed(self, now: float, began: float, count: int, is_full: bool, place: Place | None) -> None:
        """After a claim that got so many, all of one endpoint and priority if there is a place; is_full: it
        began at the beginning."""
        self._place = place
        self._unmeasured = self._unmeasured + 1 if is_full and place is not None and count >= MEASURED_CLAIM else 0
        if is_full:
            lost = now - began - CLAIM_SECONDS - count * self._seconds
            self._until = now + min(RESUME_LONGEST, max(0.0, lost) * RESUME_PARTS)
        elif count >= MEASURED_CLAIM:
            self._seconds += ((now - began) / count - self._seconds) / 4
