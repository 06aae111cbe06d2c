"""librdkafka's producer by its C functions. Its binding for Python lacks two of them: one has each connection judged as
it is dialled, the other signals delivery reports by a descriptor.

The layouts and functions are the same in all versions from 1.6 to 2.14. Each call releases Python's lock while it runs:
one of librdkafka's threads may need it, to have a connection judged.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_void_p,
    create_string_buffer,
    get_errno,
    py_object,
    pythonapi,
    sizeof,
    string_at,
)
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from ulak.messages import bulkhead
from ulak.sessions.leaving import skip_exit_handlers
from ulak.sessions.signals import start_thread

# Whether a connection may be made, to this broker (host:port) at this address. Called in librdkafka's threads.
MayDial = Callable[[str, str], bool]

NAME = "librdkafka.so.1"

_PRODUCER = 0
_TOPIC, _PARTITION, _VALUE, _KEY, _OPAQUE, _FLAGS, _HEADER = 1, 3, 4, 5, 6, 7, 9
# librdkafka copies the message.
_COPY = 2
_PURGE_ALL = 3
_REPORTS, _ERROR = 1, 8
_REPORTS_AT_ONCE = 1000
# Bytes of a message that need no memory of its own.
_ROOM = 64 * 1024
_REASON_BYTES = 512


class Problem(NamedTuple):
    """An error of librdkafka or of a broker."""

    code: int
    # Such as MSG_SIZE_TOO_LARGE; librdkafka's own begin with an underscore.
    name: str
    # Begins with "Local:" or "Broker:", which says where it was noticed, or names the broker.
    told: str
    is_fatal: bool = False


class Record(NamedTuple):
    # Topic and names of headers end at a zero byte, so they contain none.
    topic: bytes
    value: bytes
    key: bytes | None
    headers: list[tuple[bytes, bytes]]


class Refused(Exception):
    """librdkafka takes no producer with these properties."""


class _Value(Union):
    _fields_ = (("number", c_int64), ("pointer", c_void_p), ("all", c_char * 64))


class _Argument(Structure):
    """rd_kafka_vu_t"""

    _fields_ = (("kind", c_int), ("value", _Value))


class _Message(Structure):
    """rd_kafka_message_t"""

    _fields_ = (
        ("error", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("length", c_size_t),
        ("key", c_void_p),
        ("key_length", c_size_t),
        ("offset", c_int64),
        ("opaque", c_void_p),
    )


_Connect = CFUNCTYPE(c_int, c_int, c_void_p, c_int, c_char_p, c_void_p)
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    # The result, and the arguments.
    "conf_new": (c_void_p,),
    "conf_destroy": (None, c_void_p),
    "conf_set": (c_int, c_void_p, c_char_p, c_char_p, c_void_p, c_size_t),
    "conf_set_connect_cb": (None, c_void_p, _Connect),
    "conf_set_events": (None, c_void_p, c_int),
    "new": (c_void_p, c_int, c_void_p, c_void_p, c_size_t),
    "destroy": (None, c_void_p),
    "brokers_add": (c_int, c_void_p, c_char_p),
    "metadata": (c_int, c_void_p, c_int, c_void_p, POINTER(c_void_p), c_int),
    "metadata_destroy": (None, c_void_p),
    "purge": (c_int, c_void_p, c_int),
    "produceva": (c_void_p, c_void_p, c_void_p, c_size_t),
    "error_code": (c_int, c_void_p),
    "error_destroy": (None, c_void_p),
    "err2name": (c_char_p, c_int),
    "err2str": (c_char_p, c_int),
    "queue_get_main": (c_void_p, c_void_p),
    "queue_destroy": (None, c_void_p),
    "queue_io_event_enable": (None, c_void_p, c_int, c_char_p, c_size_t),
    "queue_poll": (c_void_p, c_void_p, c_int),
    "event_type": (c_int, c_void_p),
    "event_destroy": (None, c_void_p),
    "event_error": (c_int, c_void_p),
    "event_error_string": (c_char_p, c_void_p),
    "event_error_is_fatal": (c_int, c_void_p),
    "event_message_array": (c_size_t, c_void_p, POINTER(c_void_p), c_size_t),
}


def _declared(library: CDLL, prefix: str, functions: Mapping[str, tuple[Any, ...]]) -> Any:
    found = {}
    for name, (result, *arguments) in functions.items():
        found[name] = function = library[prefix + name]
        function.restype, function.argtypes = result, arguments
    return SimpleNamespace(**found)


_rd = _declared(CDLL(NAME), "rd_kafka_", _FUNCTIONS)
_libc = _declared(CDLL(None, use_errno=True), "", {"connect": (c_int, c_int, c_char_p, c_uint)})
_python = _declared(pythonapi, "Py_", {"IncRef": (None, py_object), "DecRef": (None, py_object)})


class Producer:
    def __init__(self, properties: Mapping[str, Any], may_dial: MayDial) -> None:
        """Raises Refused."""
        self._handle: int | None = None
        skip_exit_handlers()
        # Readable while there may be something to poll() for; at once, since librdkafka signals only what is new.
        self.descriptor = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        connect = _Connect(bulkhead.contained(partial(_connect, may_dial, self.descriptor), errno.EACCES))
        self._reported = (c_void_p * _REPORTS_AT_ONCE)()
        self._arguments = create_string_buffer(0)
        self._room = create_string_buffer(_ROOM)
        self._bytes = memoryview(self._room).cast("B")
        # librdkafka's own reference, until its last thread has ended: then nothing calls it any more.
        _python.IncRef(connect)
        try:
            self._handle = _new(properties, connect)
        except Exception:
            _python.DecRef(connect)
            os.close(self.descriptor)
            raise
        self._queue: int = _rd.queue_get_main(self._handle)
        self._connect = connect
        _rd.queue_io_event_enable(self._queue, self.descriptor, struct.pack("=Q", 1), 8)

    def dial(self, servers: str) -> None:
        """Begins to connect. Topics that it knows by then are in its first question to the cluster; the metadata of one
        that it gets to know a moment later may come after a second (2.0.2: in 2 of 40 cases)."""
        _rd.brokers_add(self._handle, servers.encode())

    def ask(self) -> None:
        """Has the cluster list its brokers, without waiting for it. After each answer librdkafka tries to get the id
        that an idempotent producer needs; otherwise it tries only twice a second."""
        answer = c_void_p()
        if _rd.metadata(self._handle, 0, None, byref(answer), 0) == 0:
            _rd.metadata_destroy(answer)

    def produce(self, record: Record, partition: int, number: int) -> Problem | None:
        """Hands a record over; poll() reports on it by this number, from 1 on. A problem: it was not taken, and there
        is no report. Of partition -1 librdkafka decides by the key."""
        topic, value, key, headers = record
        pieces = [topic, b"\0", value, key or b""]
        for name, text in headers:
            pieces += (name, b"\0", text)
        joined = b"".join(pieces)
        size = len(joined)
        if size <= _ROOM:
            room = self._room
            self._bytes[:size] = joined
        else:
            room = create_string_buffer(joined, size)
        at = addressof(room)
        packed = [_TOPIC, at, _PARTITION, partition, _OPAQUE, number, _FLAGS, _COPY]
        at += len(topic) + 1
        packed += (_VALUE, at, len(value))
        at += len(value)
        packed += (_KEY, 0, 0) if key is None else (_KEY, at, len(key))
        at += len(key or b"")
        for name, text in headers:
            behind = at + len(name) + 1
            packed += (_HEADER, at, behind, len(text))
            at = behind + len(text)
        layout = _layout(len(headers))
        if layout.size > len(self._arguments):
            self._arguments = create_string_buffer(layout.size)
        layout.pack_into(self._arguments, 0, *packed)
        error = _rd.produceva(self._handle, self._arguments, 6 + len(headers))
        if error is None:
            return None
        code = _rd.error_code(error)
        _rd.error_destroy(error)
        return problem(code)

    def poll(self) -> list[tuple[int, Problem | None]]:
        """What has happened, in order: the number of a record that was delivered or has a problem; 0 for a problem of
        the producer."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        found: list[tuple[int, Problem | None]] = []
        while event := _rd.queue_poll(self._queue, 0):
            try:
                kind = _rd.event_type(event)
                if kind == _ERROR:
                    found.append((0, _told(event)))
                while kind == _REPORTS and (count := _rd.event_message_array(event, self._reported, _REPORTS_AT_ONCE)):
                    for each in filter(None, self._reported[:count]):
                        message = _Message.from_address(each)
                        code = message.error
                        found.append((message.opaque, problem(code) if code else None))
            finally:
                _rd.event_destroy(event)
        return found

    def ending(self) -> Callable[[], None]:
        """What ends it, which drops unsent records. It waits for librdkafka's threads, one of which may be resolving a
        name, and must not run in one of them. The producer can't be used any more."""
        handle, self._handle = self._handle, None
        assert handle is not None
        return partial(_end, handle, self._queue, self._connect, self.descriptor)

    def __del__(self) -> None:
        if self._handle is not None:
            start_thread(self.ending())


def problem(code: int) -> Problem:
    return Problem(code, _text(_rd.err2name(code)), _text(_rd.err2str(code)))


def _told(event: int) -> Problem:
    code = _rd.event_error(event)
    told = _text(_rd.event_error_string(event))
    return Problem(code, _text(_rd.err2name(code)), told, bool(_rd.event_error_is_fatal(event)))


def _new(properties: Mapping[str, Any], connect: Any) -> int:
    reason = create_string_buffer(_REASON_BYTES)
    conf = _rd.conf_new()
    for name, value in properties.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if _rd.conf_set(conf, name.encode(), text.encode(), reason, _REASON_BYTES):
            _rd.conf_destroy(conf)
            raise Refused(_text(reason.value))
    # Brokers may ask for metrics about their clients. Versions before 2.5 have none, and don't know the property.
    _rd.conf_set(conf, b"enable.metrics.push", b"false", reason, _REASON_BYTES)
    _rd.conf_set_connect_cb(conf, connect)
    _rd.conf_set_events(conf, _REPORTS | _ERROR)
    # Takes the conf over, unless it fails.
    handle: int | None = _rd.new(_PRODUCER, conf, reason, _REASON_BYTES)
    if handle is None:
        _rd.conf_destroy(conf)
        raise Refused(_text(reason.value))
    return handle


def _connect(
    may_dial: MayDial, descriptor: int, number: int, address: int, length: int, broker: bytes, opaque: object
) -> int:
    """librdkafka's connect_cb: dials the very address that was judged. The result is an errno, or 0."""
    where = string_at(address, length)
    if not may_dial(broker.decode(errors="replace"), _ip(where)):
        os.eventfd_write(descriptor, 1)
        return errno.EACCES
    # The socket doesn't block.
    code = get_errno() if _libc.connect(number, where, length) else 0
    return 0 if code == errno.EINPROGRESS else code


def _ip(where: bytes) -> str:
    """Of a struct sockaddr."""
    family = int.from_bytes(where[:2], sys.byteorder)
    return socket.inet_ntop(family, where[4:8] if family == socket.AF_INET else where[8:24])


def _end(handle: int, queue: int, connect: Any, descriptor: int) -> None:
    _rd.purge(handle, _PURGE_ALL)
    _rd.queue_destroy(queue)
    _rd.destroy(handle)
    _python.DecRef(connect)
    os.close(descriptor)


# Senders choose how many headers there are.
@lru_cache(64)
def _layout(headers: int) -> struct.Struct:
    """Of the arguments for a record with so many headers: their kinds, each with its value."""
    word = "Q" if sizeof(c_void_p) == 8 else "L"
    values = (word, "i", word, "i", 2 * word, 2 * word, *headers * (3 * word,))
    before = _Argument.value.offset - sizeof(c_int)
    room = sizeof(_Value)
    parts = (f"i{before}x{each}{room - struct.calcsize('=' + each)}x" for each in values)
    return struct.Struct("=" + "".join(parts))


def _text(given: bytes | None) -> str:
    return (given or b"").decode(errors="replace")
