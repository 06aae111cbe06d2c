"""A receiver that speaks HTTP/2 over TLS and answers 200."""

from __future__ import annotations

import socket

import h2.config
import h2.connection
import h2.events

from support.receiver import Certificate, Listener


class Http2Receiver(Listener):
    def __init__(self, certificate: Certificate) -> None:
        self.bodies: list[bytes] = []
        super().__init__(certificate=certificate)
        assert self._context is not None
        self._context.set_alpn_protocols(["h2", "http/1.1"])

    def serve(self, connection: socket.socket, number: int) -> None:
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        state.initiate_connection()
        connection.sendall(state.data_to_send())
        bodies: dict[int, bytes] = {}
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                    state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    self.bodies.append(bodies.pop(event.stream_id, b""))
                    state.send_headers(event.stream_id, [(":status", "200")], end_stream=True)
            connection.sendall(state.data_to_send())
