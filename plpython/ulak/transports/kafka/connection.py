"""A librdkafka producer as a connection. It has its own threads and sockets."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from ulak.messages import bulkhead
from ulak.messages.delivery import MESSAGE, PERMANENT, RETRYABLE, Endpoint, Message
from ulak.safety import files
from ulak.transports.broker import message as messages
from ulak.transports.broker.background import Background
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.errors import Lost
from ulak.transports.broker.link import Link, Surroundings
from ulak.transports.kafka import reach, verdict
from ulak.transports.kafka.target import Target

# Seconds between two polls for delivery reports while messages are in flight: the Python binding has no way to signal
# them. A thread that waits for reports needs Python's lock for each, and gets it only every 5 ms while the worker is
# busy: 5,900 reports a second at 169 us of processor time, against 336,000 at 2 us for a worker that polls.
_SOONEST = 0.001
# The longest time between two polls, reached when no report has come for a while.
_LATEST = 0.02
# How often the cluster's brokers are listed and checked, and how long the answer may take.
_LOOK_SECONDS = 5.0
_LOOK_TIMEOUT = 3.0
_MOST_ERRORS = 20

_Reports = deque[tuple[Delivery, Message, KafkaError | None]]


class _Record(NamedTuple):
    topic: str
    value: bytes
    key: str | None
    headers: list[tuple[str, str]]


class KafkaConnection(Link):
    target: Target
    # A producer has a thread for each broker of its cluster, and two more.
    most_links = 20

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._producer: Producer | None = None
        # Filled by librdkafka's callbacks, in any thread. The callbacks refer only to these two, so that they keep
        # nothing else alive.
        self._reports: _Reports = deque()
        self._errors: deque[KafkaError] = deque(maxlen=_MOST_ERRORS)
        self._is_looking = False
        self._ending: Background[None] | None = None
        self._next_look = 0.0
        self._pace = _SOONEST
        # A topic in use: the cluster's metadata is requested for it.
        self._topic = ""

    @property
    def peer(self) -> str:
        return self.target.peer

    def dial(self) -> None:
        """Asks for the metadata of the first message's topic, which librdkafka would ask for next."""
        delivery = self._waiting[0]
        first = next(filter(None, (self.encoded(delivery, message) for message in delivery.messages)), None)
        if first is None:
            # None of its messages can be sent; each has its outcome.
            self._waiting.popleft()
            self._surroundings.settled.append(delivery.settled())
            return
        files.check(self.target.files)
        self.is_dialled = True
        self._topic = first.topic
        guard = self._surroundings.guard
        work = partial(reach.reach, self.target, guard, first.topic, self._errors, self._opens_until, self._clock)
        self.in_background(work, self._reached)

    def send(self, delivery: Delivery) -> None:
        super().send(delivery)
        self._pace = _SOONEST
        self.timer_at = self._clock() + _SOONEST

    def encode(self, message: Message) -> _Record:
        target = self.target
        made = messages.content(message, target.events)
        key = message.ordering_key or (target.key.of(message) if target.key is not None else None)
        headers = messages.headers(message, made, "ce_", target.headers)
        return _Record(target.topic.of(message), made.body, key, list(headers.items()))

    def publish(self, delivery: Delivery, message: Message, encoded: _Record) -> None:
        assert self._producer is not None
        topic, value, key, headers = encoded
        report = partial(_report, self._reports, delivery, message)
        try:
            self._producer.produce(topic, value, key, self.target.partition, report, headers=headers)
            self._topic = topic
        except BufferError:
            told = f"kafka: {self.peer}: librdkafka holds as many messages as it may"
            self.refuse(delivery, message, RETRYABLE, told)
        except KafkaException as error:
            # librdkafka itself refuses it, for example because it is too large. It was never sent.
            prefix, told = self._failure(error.args[0])
            self.refuse(delivery, message, f"{PERMANENT} {MESSAGE}" if prefix == PERMANENT else prefix, told)
        # The Python binding can't encode the record.
        except (ValueError, TypeError) as error:
            delivery.fail(message, bulkhead.unbuildable(error))

    def timer_passed(self) -> None:
        if not self._under_way:
            self.timer_at = None
            return
        now = self._clock()
        if now >= self._next_look and not self._is_looking:
            self._is_looking = True
            guard = self._surroundings.guard
            look = partial(reach.look, self._producer, self.target, guard, self._topic, _LOOK_TIMEOUT)
            self.in_background(look, self._looked)
        self.timer_at = now + self._pace

    def leave(self) -> int | None:
        """Closing a producer waits for librdkafka's threads, one of which may be resolving a name. So a thread of ours
        does it. It needs Python's lock, which it can't get once the session has left Python."""
        if self._producer is None:
            return None
        held = [self._producer]
        self._producer = None
        self._ending = Background(partial(_end, held))
        return self._ending.descriptor

    def close(self) -> None:
        super().close()
        self.leave()
        if self._ending is not None:
            self._ending.close()
            self._ending = None

    def _reached(self, producer: Producer) -> None:
        self._producer = producer
        self._next_look = self._clock() + _LOOK_SECONDS
        self.open()

    def _looked(self, _: None) -> None:
        self._is_looking = False
        self._next_look = self._clock() + _LOOK_SECONDS

    def hear(self) -> None:
        """Handles librdkafka's delivery reports."""
        if self._producer is None:
            return
        self._producer.poll(0)
        reports = self._reports
        self._pace = _SOONEST if reports else min(self._pace * 1.5, _LATEST)
        for each in self._errors:
            if verdict.is_last(each):
                raise Lost(f"kafka: {self.peer}: {verdict.words(each)}")
        while reports:
            delivery, message, error = reports.popleft()
            if error is None:
                # A message has arrived, so earlier errors are over.
                self._errors.clear()
                self.acknowledge(delivery, message)
            else:
                self.refuse(delivery, message, *self._failure(error))

    def _failure(self, error: KafkaError) -> tuple[str, str]:
        told = verdict.words(error)
        if error.code() == KafkaError._MSG_TIMED_OUT and (reason := reach.reason(self._errors)):
            told = f"{told}: {reason}"
        kind = "login" if error.code() in verdict.LOGIN else "kafka"
        return verdict.prefix(error), f"{kind}: {self.peer}: {told}"


def _report(reports: _Reports, delivery: Delivery, message: Message, error: KafkaError | None, _: object) -> None:
    reports.append((delivery, message, error))


def _end(held: list[Producer]) -> None:
    """Drops unsent messages. The list holds the only reference, so the producer ends here."""
    producer = held.pop()
    producer.purge()
    # Runs the callbacks of the dropped messages, which releases them.
    producer.poll(0)
