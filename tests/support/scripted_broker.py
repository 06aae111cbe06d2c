"""A broker over a real socket that speaks AMQP as far as a script lets it: for what RabbitMQ does rarely or never."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from pika import frame, spec

from support.receiver import Listener

# Gets each frame that a client sends once its channel is open.
Script = Callable[["Session", Any], None]


class Session:
    """One connection of a client."""

    def __init__(self, server: ScriptedBroker, connection: socket.socket) -> None:
        self.server = server
        self.connection = connection
        self.published = 0

    def say(self, method: Any, channel: int = 1) -> None:
        self.connection.sendall(frame.Method(channel, method).marshal())

    def give_back(self, properties: Any, body: bytes) -> None:
        """What follows basic.return."""
        self.connection.sendall(frame.Header(1, len(body), properties).marshal() + frame.Body(1, body).marshal())

    def frames(self) -> Iterator[Any]:
        data = b""
        while chunk := self.connection.recv(65536):
            data += chunk
            while data:
                used, found = frame.decode_frame(data)
                if found is None:
                    break
                data = data[used:]
                yield found


class ScriptedBroker(Listener):
    def __init__(self, script: Script, heartbeat: int = 0, frame_max: int = 131_072) -> None:
        self.script = script
        self.heartbeat = heartbeat
        self.frame_max = frame_max
        # Methods that clients have sent, of all connections.
        self.heard: list[Any] = []
        self.heartbeats = 0
        super().__init__()

    def count(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.heard)

    def serve(self, connection: socket.socket, number: int) -> None:
        session = Session(self, connection)
        for each in session.frames():
            if isinstance(each, frame.ProtocolHeader):
                session.say(spec.Connection.Start(0, 9, {}, "PLAIN AMQPLAIN", "en_US"), 0)
                continue
            if isinstance(each, frame.Heartbeat):
                self.heartbeats += 1
            method = getattr(each, "method", None)
            if method is not None:
                self.heard.append(method)
            if isinstance(method, spec.Connection.StartOk):
                session.say(spec.Connection.Tune(10, self.frame_max, self.heartbeat), 0)
            elif isinstance(method, spec.Connection.Open):
                session.say(spec.Connection.OpenOk(""), 0)
            elif isinstance(method, spec.Channel.Open):
                session.say(spec.Channel.OpenOk(b""))
            elif isinstance(method, spec.Confirm.Select):
                session.published = 0
                session.say(spec.Confirm.SelectOk())
            else:
                session.published += isinstance(each, frame.Body)
                self.script(session, each)
