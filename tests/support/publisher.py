"""pika's own loop, publishing to RabbitMQ with confirms: what a delivery by ulak is measured beside."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import pika

from support.rabbitmq import PASSWORD, USER, RabbitMQ


class Publisher:
    """Publishes from its callbacks, mandatory and persistent, and ends when all are confirmed."""

    def __init__(self, broker: RabbitMQ, exchange: str, bodies: Iterable[bytes], most_unconfirmed: int) -> None:
        credentials = pika.PlainCredentials(USER, PASSWORD)
        parameters = pika.ConnectionParameters(broker.host, broker.port, "/", credentials)
        self._exchange = exchange
        self._bodies: Iterator[bytes] = iter(bodies)
        self._most = most_unconfirmed
        self._number = 0
        self._unconfirmed: dict[int, None] = {}
        self._connection: Any = pika.SelectConnection(parameters, self._opened, self._failed, self._closed)

    def run(self) -> int:
        """How many were confirmed."""
        self._connection.ioloop.start()
        assert not self._unconfirmed
        return self._number

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._select)

    def _select(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._confirmed, lambda _: self._publish())

    def _publish(self) -> None:
        while len(self._unconfirmed) < self._most and (body := next(self._bodies, None)) is not None:
            self._number += 1
            self._unconfirmed[self._number] = None
            properties = pika.BasicProperties(
                content_type="application/json",
                delivery_mode=2,
                message_id=str(uuid.uuid4()),
                timestamp=1_794_916_800,
                headers={"ulak-attempt": 1},
                app_id="bare",
            )
            self._channel.basic_publish(self._exchange, "order.created", body, properties, mandatory=True)
        if not self._unconfirmed:
            self._connection.close()

    def _confirmed(self, frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        tag = frame.method.delivery_tag
        tags = list(takewhile(lambda each: each <= tag, self._unconfirmed)) if frame.method.multiple else [tag]
        for each in tags:
            del self._unconfirmed[each]
        self._publish()

    def _failed(self, connection: Any, error: Exception) -> None:
        raise error

    def _closed(self, connection: Any, reason: object) -> None:
        connection.ioloop.stop()
