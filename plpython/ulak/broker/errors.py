"""Why a connection to a broker can't be used: words for a human, and the prefix that the database decides by."""

from __future__ import annotations

from ulak.delivery import RETRYABLE


class BrokerError(Exception):
    def __init__(self, problem: str, prefix: str = RETRYABLE) -> None:
        super().__init__(problem)
        self.prefix = prefix


class DialError(BrokerError):
    """The broker can't be reached."""


class Lost(BrokerError):
    """Raised by a protocol: the connection can't be used any longer."""
