"""Prefetched requests: claimed before there is a request slot, so that one is under way as soon as another ends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence

from ulak.messages.delivery import Endpoint, Message
from ulak.worker.tuning import PREFETCH_ENDPOINTS, PREFETCH_SECONDS, RATE_MEMORY_SECONDS

Waiting = tuple[Endpoint, Sequence[Message]]

# With more endpoints answering than these, nobody uses the rate of a single one.
_MOST_WITH_RATES = 2 * PREFETCH_ENDPOINTS


class Prefetched:
    """Endpoints take turns."""

    def __init__(self) -> None:
        self._requests: dict[int, deque[Waiting]] = {}
        # Messages, not requests: in sum and by endpoint.
        self._messages = 0
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """Messages, not requests."""
        return self._messages

    def endpoint_ids(self) -> KeysView[int]:
        return self._requests.keys()

    def count(self, endpoint_id: int) -> int:
        return self._counts[endpoint_id]

    def add(self, to: Endpoint, groups: Iterable[Sequence[Message]]) -> None:
        """One request each."""
        requests = self._requests.setdefault(to.id, deque())
        for messages in groups:
            requests.append((to, messages))
            self._count(to.id, len(messages))

    def append(self, other: Prefetched) -> None:
        """All of another, which is empty then."""
        for endpoint_id, requests in other._requests.items():
            self._requests.setdefault(endpoint_id, deque()).extend(requests)
            self._count(endpoint_id, other.count(endpoint_id))
        other._requests = {}
        other._messages = 0
        other._counts.clear()

    def take(self, room_of: Callable[[int], int], has_room: Callable[[], bool]) -> Iterator[Waiting]:
        """As many as there is room for, which the caller takes before it asks for the next."""
        while self._requests and has_room():
            is_alone = len(self._requests) == 1
            before = self._messages
            for endpoint_id in list(self._requests):
                count = room_of(endpoint_id)
                if count > 0:
                    requests = self._requests.pop(endpoint_id)
                    if is_alone:
                        taken = [requests.popleft() for _ in range(min(count, len(requests)))]
                        self._count(endpoint_id, -sum([len(messages) for _, messages in taken]))
                        yield from taken
                    else:
                        first = requests.popleft()
                        self._count(endpoint_id, -len(first[1]))
                        yield first
                    # Put behind the others, whose turn comes first now and at the next call.
                    if requests:
                        self._requests[endpoint_id] = requests
                elif not has_room():
                    return
            if self._messages == before:
                return

    def remove(self, endpoint_id: int) -> list[Message]:
        """All of an endpoint."""
        removed = [message for _, messages in self._requests.pop(endpoint_id, ()) for message in messages]
        self._count(endpoint_id, -len(removed))
        return removed

    def remove_lost(self, held: Collection[int]) -> list[Message]:
        """Requests of which a message is no longer held."""
        lost: list[Message] = []
        for endpoint_id, requests in list(self._requests.items()):
            kept: deque[Waiting] = deque()
            for each in requests:
                if all(message.id in held for message in each[1]):
                    kept.append(each)
                else:
                    lost += each[1]
                    self._count(endpoint_id, -len(each[1]))
            self._requests[endpoint_id] = kept
            if not kept:
                del self._requests[endpoint_id]
        return lost

    def _count(self, endpoint_id: int, messages: int) -> None:
        self._messages += messages
        self._counts[endpoint_id] += messages


class Rates:
    """How many messages are answered per second, of late: of each endpoint, and of all."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[float, float]] = {}
        self._total = (0.0, 0.0)
        # When old rates are dropped next, where they are many.
        self._forget_at = 0.0

    def note(self, counts: Mapping[int, int], now: float) -> None:
        start = (0.0, now - RATE_MEMORY_SECONDS)
        if len(counts) > _MOST_WITH_RATES:
            # Only their number counts: when they are few again, what is known now is too old to count.
            self._rates.update(dict.fromkeys(counts, (0.0, now)))
        else:
            for endpoint_id, count in counts.items():
                self._rates[endpoint_id] = _follow(self._rates.get(endpoint_id, start), count, now)
        self._total = _follow(max(self._total, start, key=lambda known: known[1]), sum(counts.values()), now)

    def allowed(self, now: float) -> dict[int, int]:
        """How many messages of which endpoint may be prefetched; of none where many answer."""
        self._forget_old(now)
        if self._are_many:
            return {}
        found = {endpoint_id: int(rate * PREFETCH_SECONDS) for endpoint_id, (rate, _) in self._rates.items()}
        allowed = {endpoint_id: count for endpoint_id, count in found.items() if count}
        return allowed if len(allowed) <= PREFETCH_ENDPOINTS else {}

    def allowed_in_turn(self, now: float) -> int:
        """How many messages may be prefetched of all endpoints together, as their turns come; none where few answer."""
        self._forget_old(now)
        return int(self._total[0] * PREFETCH_SECONDS) if self._are_many else 0

    @property
    def _are_many(self) -> bool:
        return len(self._rates) > _MOST_WITH_RATES

    def _forget_old(self, now: float) -> None:
        """Drops rates without an answer of late: of many only now and then, since it looks at each of them."""
        if now >= self._forget_at or not self._are_many:
            self._forget_at = now + RATE_MEMORY_SECONDS
            self._rates = {id: known for id, known in self._rates.items() if known[1] > now - RATE_MEMORY_SECONDS}


def _follow(known: tuple[float, float], count: int, now: float) -> tuple[float, float]:
    """A rate after so many more answers. The older what is known, the less it counts."""
    rate, at = known
    seconds = max(0.001, now - at)
    weight = min(1.0, seconds / PREFETCH_SECONDS)
    return rate + (count / seconds - rate) * weight, now
