"""The leases that a worker holds: on messages it has claimed, and neither settled nor given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ulak.messages.delivery import Message
from ulak.worker.port import Claimed
from ulak.worker.tuning import PAYLOAD_BYTES, UNKNOWN_BYTES


class Leases:
    def __init__(self, most: int | None = None) -> None:
        """At most so many at once."""
        self._most = most
        self._attempts: dict[int, int] = {}
        self._bytes = 0
        self._average_bytes = UNKNOWN_BYTES

    def __len__(self) -> int:
        return len(self._attempts)

    def ids(self) -> list[int]:
        return list(self._attempts)

    def attempts(self) -> list[int]:
        """In the order of ids()."""
        return list(self._attempts.values())

    def room(self) -> int:
        """How many more messages may be claimed."""
        room = (PAYLOAD_BYTES - self._bytes) // self._average_bytes
        return room if self._most is None else min(room, self._most - len(self._attempts))

    def receive(self, claimed: Sequence[Claimed]) -> tuple[int, int]:
        """How many there are, and the highest id."""
        count = size = newest = 0
        for each in claimed:
            ids = {message.id: message.attempt for message in each.messages}
            self._attempts.update(ids)
            newest = max(newest, *ids)
            count += len(ids)
            size += sum([len(message.payload) for message in each.messages])
        self._bytes += size
        if count:
            self._average_bytes = max(1, size // count, self._average_bytes // 2)
        return count, newest

    def clear(self) -> None:
        self._attempts.clear()
        self._bytes = 0

    def forget(self, messages: Iterable[Message]) -> None:
        attempts = self._attempts
        size = 0
        for message in messages:
            size += len(message.payload)
            # Unless it was lost and claimed again since.
            if attempts.get(message.id) == message.attempt:
                del attempts[message.id]
        self._bytes -= size
