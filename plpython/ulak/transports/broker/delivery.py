"""Messages on their way to a broker, until each has its outcome."""

from __future__ import annotations

from collections.abc import Sequence

from ulak.messages.delivery import DELIVERED, Endpoint, Message, Outcome, Settled


class Delivery:
    __slots__ = ("_failures", "_left", "deadline", "endpoint", "messages")

    def __init__(self, endpoint: Endpoint, messages: Sequence[Message], deadline: float) -> None:
        self.endpoint = endpoint
        self.messages = messages
        # Messages that aren't acknowledged by then have failed.
        self.deadline = deadline
        self._left = {message.id for message in messages}
        self._failures: dict[int, Outcome] = {}

    @property
    def is_settled(self) -> bool:
        return not self._left

    def succeed(self, message: Message) -> None:
        """The broker has acknowledged it. Only the first outcome of a message counts."""
        self._left.discard(message.id)

    def fail(self, message: Message, error: str) -> None:
        """The error begins with [RETRYABLE] or [PERMANENT]."""
        if message.id in self._left:
            self._left.remove(message.id)
            self._failures[message.id] = Outcome(error)

    def fail_the_rest(self, error: str) -> None:
        for message in self.messages:
            self.fail(message, error)

    def settled(self) -> Settled:
        failures = self._failures
        if not failures:
            outcome = DELIVERED
        elif len(failures) == len(self.messages) and len({each.error for each in failures.values()}) == 1:
            outcome = failures[self.messages[0].id]
        else:
            outcome = Outcome(failures=failures)
        return Settled(self.endpoint.id, self.messages, outcome)
