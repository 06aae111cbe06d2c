"""When a run ends, and why."""

from __future__ import annotations

from ulak.worker.port import Orders
from ulak.worker.tuning import GRACE_SECONDS, STOP_SECONDS


class Ending:
    def __init__(self, until: float, settings: str) -> None:
        """`settings` is what the worker's options were made from."""
        self.until = until
        self._settings = settings
        # stop, restart (there is another build) or settings (they changed).
        self.leave: str | None = None

    @property
    def why(self) -> str:
        return self.leave or "over"

    @property
    def is_stop(self) -> bool:
        return self.leave == "stop"

    def obey(self, orders: Orders, now: float) -> None:
        leave = orders.leave or ("settings" if orders.settings != self._settings else None)
        if leave is not None and not self.is_stop:
            self.leave = leave
            self.until = min(self.until, now)

    def last_moment(self, last_end: float) -> float:
        """When what is held is given up; last_end: when all deliveries under way will have ended."""
        return self.until + STOP_SECONDS if self.is_stop else max(self.until + GRACE_SECONDS, last_end)
