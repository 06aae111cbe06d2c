"""A librdkafka producer as a connection. It has its own threads and sockets."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from functools import partial

from ulak.messages.delivery import MESSAGE, PERMANENT, RETRYABLE, Endpoint, Message
from ulak.safety import files
from ulak.transports.broker import message as messages
from ulak.transports.broker.background import Background
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.errors import Lost
from ulak.transports.broker.link import Link, Surroundings
from ulak.transports.kafka import reach, verdict
from ulak.transports.kafka.librdkafka import Problem, Producer, Record, Refused
from ulak.transports.kafka.target import Target
from ulak.transports.transport import READABLE

_MOST_ERRORS = 20
# A new producer without an acknowledgement asks its cluster again after this many seconds, then after twice as many,
# and so on. 2.14 connects a second time after 51 ms; the first message takes 61 to 208 ms, and 502 to 1,033 without
# asking.
_FIRST_ASK = 0.06


class KafkaConnection(Link):
    target: Target
    # A producer has a thread for each broker of its cluster, and two more.
    most_links = 20

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._producer: Producer | None = None
        self._gate: reach.Gate | None = None
        self._errors: deque[Problem] = deque(maxlen=_MOST_ERRORS)
        self._numbers = itertools.count(1)
        # By the number of the record.
        self._in_flight: dict[int, tuple[Delivery, Message]] = {}
        # The cluster has taken a message.
        self._is_proven = False
        self._ask_seconds = _FIRST_ASK
        self._ending: Background[None] | None = None

    @property
    def peer(self) -> str:
        return self.target.peer

    def dial(self) -> None:
        self.is_dialled = True
        self.in_background(partial(reach.servers, self.target, self._surroundings.guard), self._found)

    def encode(self, message: Message) -> Record:
        target = self.target
        made = messages.content(message, target.events)
        key = message.ordering_key or (target.key.of(message) if target.key is not None else None)
        headers = [
            (name.encode(), text.encode())
            for name, text in messages.headers(message, made, "ce_", target.headers).items()
        ]
        if any(b"\0" in name for name, _ in headers):
            raise ValueError
        return Record(target.topic.of(message).encode(), made.body, None if key is None else key.encode(), headers)

    def publish(self, delivery: Delivery, message: Message, encoded: Record) -> None:
        assert self._producer is not None
        number = next(self._numbers)
        problem = self._producer.produce(encoded, self.target.partition, number)
        if problem is None:
            self._in_flight[number] = delivery, message
        elif problem.code == verdict.QUEUE_FULL:
            told = f"kafka: {self.peer}: librdkafka holds as many messages as it may"
            self.refuse(delivery, message, RETRYABLE, told)
        else:
            # librdkafka itself refuses it, for example because it is too large. It was never sent.
            prefix, told = self._failure(problem)
            self.refuse(delivery, message, f"{PERMANENT} {MESSAGE}" if prefix == PERMANENT else prefix, told)

    def timer_passed(self) -> None:
        self.timer_at = None
        if self._producer is not None and not self._is_proven:
            self._producer.ask()
            self._ask_seconds *= 2
            self.timer_at = self._clock() + self._ask_seconds

    def leave(self) -> int | None:
        """Ending a producer waits for librdkafka's threads, so a thread of ours does it. It needs Python's lock, which
        it can't get once the session has left Python."""
        if self._producer is None:
            return None
        producer, self._producer = self._producer, None
        self.forget(producer.descriptor)
        self._ending = Background(producer.ending())
        return self._ending.descriptor

    def close(self) -> None:
        super().close()
        self.leave()
        if self._ending is not None:
            self._ending.close()
            self._ending = None

    def hear(self) -> None:
        """Handles librdkafka's delivery reports, its errors, and what the gate has refused."""
        if self._producer is None or self._gate is None:
            return
        failed, last = [], None
        for number, problem in self._producer.poll():
            if number and problem is None:
                self._is_proven = True
                self.timer_at = None
                # A message has arrived, so earlier errors are over.
                self._errors.clear()
                self.acknowledge(*self._in_flight.pop(number))
            elif number and problem is not None:
                failed.append((*self._in_flight.pop(number), problem))
            elif problem is not None:
                self._errors.append(problem)
                last = problem if verdict.is_last(problem) else last
        # What ends the producer says more than the reports of what it dropped.
        if self._gate.refusals:
            raise Lost(*self._gate.refusals.pop())
        if last is not None:
            raise Lost(f"kafka: {self.peer}: {verdict.words(last)}")
        if not self._is_proven and any(map(verdict.is_hopeless, self._errors)):
            kind = "login" if any(each.code in verdict.LOGIN for each in self._errors) else "network"
            raise Lost(f"{kind}: {verdict.reason(self._errors) or f'{self.peer}: all brokers are down'}")
        for delivery, message, problem in failed:
            self.refuse(delivery, message, *self._failure(problem))

    def _found(self, servers: Mapping[str, str]) -> None:
        files.check(self.target.files)
        self._gate = reach.Gate(self._surroundings.guard, servers)
        try:
            self._producer = Producer(self.target.properties, self._gate.may_dial)
        except Refused as error:
            raise Lost(f"config: {error}") from None
        self.watch(self._producer.descriptor, READABLE)
        self.open()
        self._producer.dial(",".join(servers))
        self.timer_at = self._clock() + self._ask_seconds

    def _failure(self, problem: Problem) -> tuple[str, str]:
        told = verdict.words(problem)
        if problem.code == verdict.MSG_TIMED_OUT and (reason := verdict.reason(self._errors)):
            told = f"{told}: {reason}"
        kind = "login" if problem.code in verdict.LOGIN else "kafka"
        return verdict.prefix(problem), f"{kind}: {self.peer}: {told}"
