"""A producer of librdkafka, which has threads and sockets of its own, as a connection of the worker."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple

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
from ulak.worker.waiting import READABLE

# Seconds between two looks for reports while something is under way: the binding for Python tells nobody that there are
# any. A thread that waits for them would need Python's lock for each, and gets it only every 5 ms while the worker
# computes: 5,900 reports a second at 169 us of processor time, against 336,000 at 2 us for a worker that fetches them.
_SOONEST = 0.001
# When none have come for a while: a broker that takes long isn't asked about a thousand times a second.
_LATEST = 0.02
# How often a cluster is asked for its brokers, to check them, and how long its answer may take.
_LOOK_SECONDS = 5.0
_LOOK_TIMEOUT = 3.0
_MOST_ERRORS = 20

_Reports = deque[tuple[Delivery, Message, KafkaError | None]]


class KafkaConnection(Link):
    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        target: Target = endpoint.target
        super().__init__(endpoint, target.mask, target.connect_timeout, surroundings)
        self._target = target
        self._producer: Producer | None = None
        # What librdkafka reports, in whichever thread. Its callbacks refer to these two alone: they keep nothing else
        # alive.
        self._reports: _Reports = deque()
        self._errors: deque[KafkaError] = deque(maxlen=_MOST_ERRORS)
        self._reaching: Background[Producer] | None = None
        self._looking: Background[None] | None = None
        self._ending: Background[None] | None = None
        self._next_look = 0.0
        self._next_fetch = 0.0
        self._pace = _SOONEST
        # A topic that messages go to: brokers are asked about it when they are asked for the cluster's metadata.
        self._topic = ""

    @property
    def peer(self) -> str:
        return self._target.peer

    def deliver(self, delivery: Delivery) -> None:
        super().deliver(delivery)
        if delivery in self._waiting and self._reaching is None:
            self._guarded(partial(self._reach, delivery))

    def send(self, delivery: Delivery) -> None:
        assert self._producer is not None
        produce = self._producer.produce
        for message in delivery.messages:
            record = self.build(delivery, message, partial(_record, self._target))
            if record is None:
                continue
            report = partial(_report, self._reports, delivery, message)
            try:
                produce(record.topic, record.value, record.key, self._target.partition, report, headers=record.headers)
                self._topic = record.topic
            except BufferError:
                told = f"kafka: {self.peer}: librdkafka holds as many messages as it may"
                delivery.fail(message, self.error(RETRYABLE, told))
            except KafkaException as error:
                # librdkafka itself refuses it, as it does if it is too large: it was never sent.
                told = self._failure(error.args[0])
                delivery.fail(message, told.replace(PERMANENT, f"{PERMANENT} {MESSAGE}", 1))
            # A record that librdkafka's binding can't encode.
            except (ValueError, TypeError) as error:
                delivery.fail(message, bulkhead.unbuildable(error))
        self._pace = _SOONEST
        self._next_fetch = self._clock() + _SOONEST

    def timer(self) -> float | None:
        return self._next_fetch if self._under_way else None

    def timer_passed(self) -> None:
        now = self._clock()
        if now >= self._next_look and self._looking is None and self._under_way:
            guard = self._surroundings.guard
            look = partial(reach.look, self._producer, self._target, guard, self._topic, _LOOK_TIMEOUT)
            self._looking = self._watched(Background(look))
        self._next_fetch = now + self._pace

    def ready(self, events: int) -> None:
        if self._reaching is not None and self._reaching.is_done():
            reached, self._reaching = self._reaching, None
            self._forget(reached)
            self._producer = reached.result()
            self._next_look = self._clock() + _LOOK_SECONDS
            self.open()
        if self._looking is not None and self._looking.is_done():
            looked, self._looking = self._looking, None
            self._forget(looked)
            self._next_look = self._clock() + _LOOK_SECONDS
            # Messages acknowledged until now are delivered, whatever the look at the metadata yields.
            self._fetch_reports()
            looked.result()

    def leave(self) -> int | None:
        """The end of a producer waits for librdkafka's threads, one of which may be resolving a name, so a thread of
        ours does it. That thread needs Python's lock, and can't have it once the session has left Python."""
        if self._producer is None:
            return None
        held = [self._producer]
        self._producer = None
        self._ending = Background(partial(_end, held))
        return self._ending.descriptor

    def close(self) -> None:
        super().close()
        for each in (self._reaching, self._looking):
            if each is not None:
                self._forget(each)
        self._reaching = self._looking = None
        self.leave()
        if self._ending is not None:
            self._ending.close()
            self._ending = None

    def _pass_time(self) -> None:
        if self._producer is not None:
            self._fetch_reports()
        super()._pass_time()

    def _reach(self, delivery: Delivery) -> None:
        """With the first topic that is asked for, of which librdkafka would ask next."""
        topic = self._first_topic(delivery)
        if topic is None:
            self._waiting.remove(delivery)
            self._surroundings.settled.append(delivery.settled())
            return
        files.check(self._target.files)
        work = partial(
            reach.reach, self._target, self._surroundings.guard, topic, self._errors, self._opens_until, self._clock
        )
        self._topic = topic
        self._reaching = self._watched(Background(work))

    def _first_topic(self, delivery: Delivery) -> str | None:
        """None: none of its messages can be sent, and each has been told why."""
        for message in delivery.messages:
            record = self.build(delivery, message, partial(_record, self._target))
            if record is not None:
                return record.topic
        return None

    def _fetch_reports(self) -> None:
        assert self._producer is not None
        self._producer.poll(0)
        reports = self._reports
        self._pace = _SOONEST if reports else min(self._pace * 1.5, _LATEST)
        for each in self._errors:
            if verdict.is_last(each):
                raise Lost(f"kafka: {self.peer}: {verdict.words(each)}")
        while reports:
            delivery, message, error = reports.popleft()
            if error is None:
                # A message has arrived: what went wrong before is over.
                self._errors.clear()
                delivery.succeed(message)
            else:
                delivery.fail(message, self._failure(error))
            if delivery.is_settled:
                self.settle(delivery)

    def _failure(self, error: KafkaError) -> str:
        told = verdict.words(error)
        if error.code() == KafkaError._MSG_TIMED_OUT and (reason := reach.reason(self._errors)):
            told = f"{told}: {reason}"
        kind = "login" if verdict.is_login(error) else "kafka"
        return self.error(verdict.prefix(error), f"{kind}: {self.peer}: {told}")

    def _watched(self, work: Background[Any]) -> Background[Any]:
        self._surroundings.descriptors.watch(work.descriptor, READABLE)
        return work

    def _forget(self, work: Background[Any]) -> None:
        self._surroundings.descriptors.forget(work.descriptor)
        work.close()


class _Record(NamedTuple):
    topic: str
    value: bytes
    key: str | None
    headers: list[tuple[str, str]]


def _record(target: Target, message: Message) -> _Record:
    """Raises MessageError."""
    made = messages.content(message, target.events)
    key = message.ordering_key or (target.key.of(message) if target.key is not None else None)
    headers = messages.headers(message, made)
    if target.headers:
        headers = {**target.headers, **headers}
    for name, value in made.attributes.items():
        headers[f"ce_{name}"] = value
    return _Record(target.topic.of(message), made.body, key, list(headers.items()))


def _report(reports: _Reports, delivery: Delivery, message: Message, error: KafkaError | None, _: object) -> None:
    reports.append((delivery, message, error))


def _end(held: list[Producer]) -> None:
    """Unsent messages are dropped. The list has the only reference, so the producer ends here."""
    producer = held.pop()
    producer.purge()
    # Runs the callbacks of what was dropped, which lets go of their messages.
    producer.poll(0)
