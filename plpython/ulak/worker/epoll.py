"""The worker's wait for its transports' descriptors and for the wake-up of a sender. A worker that holds nothing and
doesn't listen waits in the database instead (Database.await_send)."""

from __future__ import annotations

import contextlib
import select

Events = list[tuple[int, int]]

READABLE: int = select.EPOLLIN
WRITABLE: int = select.EPOLLOUT


class Waiting:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, Descriptors] = {}
        self._wake_up: int | None = None
        # The wake-up was ready when the last wait ended.
        self.was_woken = False

    def wait_also_for(self, descriptor: int) -> None:
        """A wait also ends when this can be read."""
        if descriptor != self._wake_up:
            self._wake_up = descriptor
            self._epoll.register(descriptor, select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        """Waits at most this long until a descriptor is ready; its Descriptors then has the event in .ready."""
        self.was_woken = False
        owners = self._owners
        for event in self._epoll.poll(seconds):
            descriptor = event[0]
            owner = owners.get(descriptor)
            if owner is not None:
                owner.ready.append(event)
            elif descriptor == self._wake_up:
                self.was_woken = True

    def close(self) -> None:
        self._epoll.close()


class Descriptors:
    """The descriptors of one transport."""

    def __init__(self, waiting: Waiting) -> None:
        self._epoll = waiting._epoll
        self._owners = waiting._owners
        self.ready: Events = []

    def watch(self, descriptor: int, events: int) -> None:
        try:
            self._epoll.modify(descriptor, events)
        except FileNotFoundError:
            self._epoll.register(descriptor, events)
        self._owners[descriptor] = self

    def forget(self, descriptor: int) -> None:
        self._owners.pop(descriptor, None)
        # If it has been closed since, the kernel has removed it already.
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)

    def forget_all(self) -> None:
        self.ready.clear()
        for descriptor in [each for each, owner in self._owners.items() if owner is self]:
            self.forget(descriptor)

    def take_ready(self) -> Events:
        ready, self.ready = self.ready, []
        return ready
