"""Sends one test message to an endpoint, signed and authorised like any other, without the queue."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from ulak.messages.delivery import Endpoint, Message, Outcome
from ulak.transports.dispatcher import Dispatcher

PAYLOAD = '{"type": "ulak.ping"}'
# For topics and routing keys that depend on it.
METADATA = '{"event_type": "ulak.ping"}'


def deliver(endpoint: Endpoint, dispatcher: Dispatcher, between_steps: Callable[[], object]) -> Outcome:
    """between_steps() is called at least every 100 ms."""
    message = Message(id=0, message_id=str(uuid.uuid4()), attempt=1, payload=PAYLOAD, metadata=METADATA)
    dispatcher.start(endpoint, [message])
    while True:
        for settled in dispatcher.step(0.1):
            return settled.outcome
        between_steps()
