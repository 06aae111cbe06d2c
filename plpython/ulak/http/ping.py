"""One test request to an endpoint now, signed and authorised like any other, outside of the queue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from ulak.http.client import Transport
from ulak.http.model import Endpoint, Message, Outcome
from ulak.http.transport import Courier

PAYLOAD = '{"type": "ulak.ping"}'


def ping(
    endpoint: Endpoint,
    transport: Transport,
    between_steps: Callable[[], object],
    clock: Callable[[], float] = time.time,
) -> Outcome:
    """The outcome with its response captured; between_steps() is called at least every 100 ms."""
    capturing = replace(endpoint, profile=replace(endpoint.profile, capture_response=True))
    courier = Courier(transport, clock)
    courier.send(capturing, [Message(id=0, message_id=str(uuid.uuid4()), attempt=1, payload=PAYLOAD)])
    while True:
        for settled in courier.step(0.1):
            return settled.outcome
        between_steps()
