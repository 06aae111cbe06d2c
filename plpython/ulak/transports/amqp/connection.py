"""One connection to RabbitMQ with one channel in confirm mode: a message is delivered once the broker has confirmed it.

connected -> start -> tune -> open -> channel open -> (exchange declared) -> confirms selected: messages may go. If the
broker closes the channel it is opened again, and what was unconfirmed on it has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pika
from pika import frame, spec

from ulak.messages.delivery import RETRYABLE, Endpoint, Message
from ulak.transports.amqp import frames
from ulak.transports.amqp.properties import properties
from ulak.transports.amqp.target import Target
from ulak.transports.broker import message as messages
from ulak.transports.broker.connection import Connection, Lost, Surroundings
from ulak.transports.broker.delivery import Delivery

# Capabilities beyond those of every 0-9-1 client.
_CAPABILITIES = {
    "authentication_failure_close": True,
    "basic.nack": True,
    "connection.blocked": True,
    "publisher_confirms": True,
}
_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:the )?(?:configured )?max(?:imum)? size (\d+)")


class _Unconfirmed(NamedTuple):
    delivery: Delivery
    message: Message
    size: int


class AmqpConnection(Connection):
    target: Target

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._frames = frames.Frames(self.peer)
        self._frame_max = self.target.frame_max
        self._heartbeat = 0.0
        self._heard = 0.0
        self._farewell = b""
        # Why the broker accepts no messages at the moment: on any channel ("blocked"), and on ours ("flow").
        self._stopped: dict[str, str] = {}
        # Until then, messages on the channel would be neither confirmed nor counted.
        self._has_confirms = False
        # By delivery tag: both sides number the messages of a channel.
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._number = 0
        # The broker's size limit, known after it has refused a message.
        self._largest: int | None = None
        # Messages to publish again: the broker closed their channel because of another message.
        self._again: list[tuple[Delivery, Message]] = []
        # By message id: why the broker returned it. Its confirmation follows.
        self._returned: dict[str, str] = {}
        self._returning: spec.Basic.Return | None = None
        # By routing key: the encoded basic.publish, which is the same for many messages.
        self._publish: dict[str, bytes] = {}

    # The hooks that Connection calls.

    def connected(self) -> None:
        self._heard = self._clock()
        self.write(frames.HELLO)

    def received(self, data: bytes) -> None:
        self._heard = self._clock()
        for each in self._frames.feed(data):
            if isinstance(each, frame.Method):
                take = _HANDLERS.get(type(each.method))
                if take is not None:
                    take(self, each.method)
            elif isinstance(each, frame.Header) and self._returning is not None:
                self._take_returned(self._returning, each.properties)

    def publish(self, delivery: Delivery, message: Message, encoded: tuple[bytes, int]) -> None:
        made, size = encoded
        self._number += 1
        self._unconfirmed[self._number] = _Unconfirmed(delivery, message, size)
        self.write(made)

    def timer_passed(self) -> None:
        now = self._clock()
        if now - self._heard > 2 * self._heartbeat:
            raise Lost(f"network: {self.peer} was silent for two heartbeats")
        self.timer_at = now + self._heartbeat / 2
        self.write(frames.HEARTBEAT)

    def why_slow(self) -> str | None:
        for why in self._stopped.values():
            return f"the broker accepts no messages at the moment: {why}"
        return None

    def farewell(self) -> bytes:
        """Without it the broker would log a lost connection."""
        return self._farewell

    def encode(self, message: Message) -> tuple[bytes, int]:
        """Its frames, and the size of its body."""
        target = self.target
        made = messages.content(message, target.events)
        self.check_size(len(made.body), self._largest)
        key = target.routing_key.of(message)
        publish = self._publish.get(key)
        if publish is None:
            if len(self._publish) >= 1000:
                self._publish.clear()
            given = spec.Basic.Publish(exchange=target.exchange, routing_key=key, mandatory=target.mandatory)
            publish = self._publish[key] = frames.method(frames.CHANNEL, given)
        return publish + frames.content(properties(target, message, made), made.body, self._frame_max), len(made.body)

    # The greeting, in its order.

    def _start(self, given: spec.Connection.Start) -> None:
        credentials = pika.PlainCredentials(self.target.username, self.target.password)
        mechanism, response = credentials.response_for(given)
        if mechanism is None:
            raise Lost(f"login: {self.peer} offers no login by user name and password")
        about = {
            "product": "ulak",
            "version": self._surroundings.version,
            "connection_name": f"ulak endpoint {self.endpoint.name}",
            "capabilities": _CAPABILITIES,
        }
        self._say(0, spec.Connection.StartOk(about, mechanism, response, "en_US"))

    def _secure(self, given: spec.Connection.Secure) -> None:
        raise Lost(f"login: {self.peer} asks for more than a user name and a password")

    def _tune(self, given: spec.Connection.Tune) -> None:
        wanted = self.target
        self._frame_max = min(wanted.frame_max, given.frame_max or wanted.frame_max)
        self._frames.frame_max = max(self._frame_max, spec.FRAME_MIN_SIZE)
        heartbeat = min(wanted.heartbeat, given.heartbeat) if given.heartbeat else wanted.heartbeat
        self._say(0, spec.Connection.TuneOk(given.channel_max, self._frame_max, heartbeat))
        self._say(0, spec.Connection.Open(virtual_host=wanted.vhost))
        self._farewell = frames.method(0, spec.Connection.Close(spec.REPLY_SUCCESS, "", 0, 0))
        if heartbeat:
            self._heartbeat = float(heartbeat)
            self.timer_at = self._clock() + self._heartbeat / 2

    def _open_channel(self, given: object = None) -> None:
        self._number = 0
        self._stopped.pop("flow", None)
        self._has_confirms = False
        self._say(frames.CHANNEL, spec.Channel.Open())

    def _channel_opened(self, given: object) -> None:
        target = self.target
        if target.exchange_type is None:
            self._select_confirms()
        else:
            wanted = spec.Exchange.Declare(exchange=target.exchange, type=target.exchange_type, durable=True)
            self._say(frames.CHANNEL, wanted)

    def _select_confirms(self, given: object = None) -> None:
        self._say(frames.CHANNEL, spec.Confirm.Select())

    def _confirms_selected(self, given: object) -> None:
        self._has_confirms = True
        again, self._again = self._again, []
        for delivery, message in again:
            self.send_message(delivery, message)
            self.settle(delivery)
        self._go_on()

    def _go_on(self) -> None:
        if self._has_confirms and not self._stopped:
            self.open()

    # Answers to messages.

    def _ack(self, given: spec.Basic.Ack) -> None:
        for each in self._take_unconfirmed(given.delivery_tag, given.multiple):
            problem = self._returned.pop(each.message.message_id, None) if self._returned else None
            if problem is None:
                self.acknowledge(each.delivery, each.message)
            else:
                self.refuse(each.delivery, each.message, RETRYABLE, problem)

    def _nack(self, given: spec.Basic.Nack) -> None:
        told = f"refused: {self.peer} didn't take the message: a queue is full, or failed"
        for each in self._take_unconfirmed(given.delivery_tag, given.multiple):
            self._returned.pop(each.message.message_id, None)
            self.refuse(each.delivery, each.message, RETRYABLE, told)

    def _take_unconfirmed(self, number: int, is_up_to: bool) -> list[_Unconfirmed]:
        known = self._unconfirmed
        if not is_up_to:
            found = known.pop(number, None)
            return [] if found is None else [found]
        numbers = []
        for each in known:
            # 0: all of them.
            if each > number > 0:
                break
            numbers.append(each)
        return [known.pop(each) for each in numbers]

    def _return(self, given: spec.Basic.Return) -> None:
        self._returning = given

    def _take_returned(self, given: spec.Basic.Return, of: spec.BasicProperties) -> None:
        """The header says which message it was; the body isn't needed."""
        self._returning = None
        # Each returned message is confirmed afterwards, so there can't be more of them than unconfirmed ones.
        if len(self._returned) >= len(self._unconfirmed):
            raise Lost(f"network: {self.peer} returns messages that it was never given")
        told = f"unroutable: exchange {given.exchange!r} has no queue for routing key {given.routing_key!r}"
        self._returned[of.message_id] = f"{told} ({self.peer}: {given.reply_text})"

    # Events that the broker sends by itself.

    def _channel_closed(self, given: spec.Channel.Close) -> None:
        self._say(frames.CHANNEL, spec.Channel.CloseOk())
        told = f"channel: {self.peer} closed it: {given.reply_text}"
        if not self._unconfirmed and not self.is_open:
            # The channel was being opened: retrying at once wouldn't help.
            raise Lost(told)
        too_large = _TOO_LARGE.search(given.reply_text)
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        self._returned.clear()
        self._returning = None
        largest = self._largest = int(too_large[1]) if too_large is not None else self._largest
        if largest is not None and any(each.size > largest for each in unconfirmed.values()):
            # The message that is too large isn't sent again; the others are.
            self._again = [(each.delivery, each.message) for each in unconfirmed.values()]
        else:
            for each in unconfirmed.values():
                self.refuse(each.delivery, each.message, RETRYABLE, told)
        self.hold(self.target.timeout)
        self._open_channel()

    def _closed(self, given: spec.Connection.Close) -> None:
        self._farewell = frames.method(0, spec.Connection.CloseOk())
        is_login = given.reply_code in (spec.ACCESS_REFUSED, spec.NOT_ALLOWED) and not self.is_open
        kind = "login" if is_login else "network"
        raise Lost(f"{kind}: {self.peer} closed the connection: {given.reply_text}")

    def _block(self, given: spec.Connection.Blocked) -> None:
        self._stop("blocked", given.reason or "it doesn't say why")

    def _unblock(self, given: object) -> None:
        self._stop("blocked", None)

    def _flow(self, given: spec.Channel.Flow) -> None:
        self._say(frames.CHANNEL, spec.Channel.FlowOk(given.active))
        self._stop("flow", None if given.active else "flow control")

    def _stop(self, how: str, why: str | None) -> None:
        if why is None:
            self._stopped.pop(how, None)
            self._go_on()
        else:
            self._stopped[how] = why
            self.hold(None)

    def _say(self, channel: int, given: Any) -> None:
        self.write(frames.method(channel, given))


_HANDLERS: dict[type, Callable[[AmqpConnection, Any], None]] = {
    spec.Connection.Start: AmqpConnection._start,
    spec.Connection.Secure: AmqpConnection._secure,
    spec.Connection.Tune: AmqpConnection._tune,
    spec.Connection.OpenOk: AmqpConnection._open_channel,
    spec.Connection.Close: AmqpConnection._closed,
    spec.Connection.Blocked: AmqpConnection._block,
    spec.Connection.Unblocked: AmqpConnection._unblock,
    spec.Channel.OpenOk: AmqpConnection._channel_opened,
    spec.Channel.Close: AmqpConnection._channel_closed,
    spec.Channel.Flow: AmqpConnection._flow,
    spec.Exchange.DeclareOk: AmqpConnection._select_confirms,
    spec.Confirm.SelectOk: AmqpConnection._confirms_selected,
    spec.Basic.Ack: AmqpConnection._ack,
    spec.Basic.Nack: AmqpConnection._nack,
    spec.Basic.Return: AmqpConnection._return,
}
