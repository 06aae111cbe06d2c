"""One test request to an endpoint now, signed and authorised like any other, outside of the queue."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from ulak.delivery import Endpoint, Message, Outcome
from ulak.worker.dispatcher import Dispatcher

PAYLOAD = '{"type": "ulak.ping"}'


def ping(endpoint: Endpoint, dispatcher: Dispatcher, between_steps: Callable[[], object]) -> Outcome:
    """The outcome with its response captured; between_steps() is called at least every 100 ms."""
    receiver = endpoint.target
    capturing = receiver._replace(profile=replace(receiver.profile, capture_response=True))
    message = Message(id=0, message_id=str(uuid.uuid4()), attempt=1, payload=PAYLOAD)
    dispatcher.start(endpoint._replace(target=capturing), [message])
    while True:
        for settled in dispatcher.step(0.1):
            return settled.outcome
        between_steps()
