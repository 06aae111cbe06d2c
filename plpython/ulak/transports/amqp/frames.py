"""Frames of AMQP 0-9-1; pika encodes and decodes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from pika import frame, spec
from pika.exceptions import ShortStringTooLong

from ulak.messages.delivery import MessageError
from ulak.transports.broker.connection import Lost

# The one that messages are published on; 0 is the connection itself.
CHANNEL = 1
# Bytes of what AMQP calls a short string: names, routing keys, the content type.
LONGEST_SHORT = 255
# Type, channel and length before the payload, one byte after it.
_AROUND = spec.FRAME_HEADER_SIZE + spec.FRAME_END_SIZE
_KINDS = frozenset((spec.FRAME_METHOD, spec.FRAME_HEADER, spec.FRAME_BODY, spec.FRAME_HEARTBEAT))

HELLO: bytes = frame.ProtocolHeader().marshal()
HEARTBEAT: bytes = frame.Heartbeat().marshal()


def method(channel: int, given: Any) -> bytes:
    made: bytes = frame.Method(channel, given).marshal()
    return made


def content(properties: Any, body: bytes, frame_max: int) -> bytes:
    """The frames that follow basic.publish. Raises MessageError."""
    try:
        head: bytes = frame.Header(CHANNEL, len(body), properties).marshal()
    except ShortStringTooLong:
        raise MessageError(
            f"the name of a header, or the content type, is longer than {LONGEST_SHORT} bytes, which AMQP doesn't allow"
        ) from None
    if len(head) > frame_max:
        raise MessageError(f"the message's headers take more than a frame of {frame_max} bytes")
    most = frame_max - _AROUND
    if len(body) <= most:
        # An empty body has no frame.
        return head + frame.Body(CHANNEL, body).marshal() if body else head
    pieces = [head]
    for start in range(0, len(body), most):
        pieces.append(frame.Body(CHANNEL, body[start : start + most]).marshal())
    return b"".join(pieces)


class Frames:
    """Splits incoming bytes into frames."""

    def __init__(self, peer: str) -> None:
        self.frame_max: int = spec.FRAME_MAX_SIZE
        self._peer = peer
        self._left = b""

    def feed(self, data: bytes) -> Iterator[Any]:
        """Each complete frame. Raises Lost."""
        data = self._left + data if self._left else data
        start, end = 0, len(data)
        while end - start >= spec.FRAME_HEADER_SIZE:
            kind, _, size = struct.unpack_from(">BHL", data, start)
            if kind not in _KINDS or size > self.frame_max:
                told = "another version of AMQP than 0-9-1" if data.startswith(b"AMQP", start) else "no AMQP"
                raise Lost(f"network: {self._peer} speaks {told}")
            after = start + size + _AROUND
            if after > end:
                break
            yield frame.decode_frame(data[start:after])[1]
            start = after
        self._left = data[start:]
