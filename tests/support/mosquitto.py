"""mosquitto as a child process on loopback, and a subscriber that writes down what it gets."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any, NamedTuple, Self

from paho.mqtt import client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from support.ports import is_taken, start_on_free_port
from support.receiver import Certificate
from support.sessions import hold, patience, wait_until


def make_client(client_id: str = "", protocol: int = paho.MQTTv5) -> paho.Client:
    """Of paho 1 and 2 alike."""
    first = (paho.CallbackAPIVersion.VERSION2,) if hasattr(paho, "CallbackAPIVersion") else ()
    return paho.Client(*first, client_id=client_id, protocol=protocol)


class Mosquitto:
    """config: lines of its configuration file. With a certificate it speaks TLS, and clients have to show one that it has signed."""

    def __init__(self, folder: Path, *config: str, certificate: Certificate | None = None) -> None:
        self.folder = folder
        self.certificate = certificate
        self.config = config
        start_on_free_port(self._start_at)

    def _start_at(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [f"listener {self.port} 127.0.0.1", "persistence true", f"persistence_location {self.folder}/"]
        lines += [f"log_dest file {self.folder}/log", "max_queued_messages 0", *self.config]
        if not any(line.startswith(("password_file", "allow_anonymous")) for line in self.config):
            lines.append("allow_anonymous true")
        if self.certificate is not None:
            lines += [f"certfile {self.certificate.certificate}", f"keyfile {self.certificate.key}"]
            lines += [f"cafile {self.certificate.certificate}", "require_certificate true"]
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        program = shutil.which("mosquitto")
        assert program is not None
        self._process = subprocess.Popen([program, "-c", str(self.folder / "config")], stderr=subprocess.DEVNULL)
        wait_until(self._listens, message="mosquitto")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """As a service is stopped: it writes down the sessions that it holds."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait()

    def stop(self) -> None:
        """Its kernel accepts connections and bytes, and it answers nothing."""
        hold(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()

    def _listens(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        return is_taken(self.port)


class Received(NamedTuple):
    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: dict[str, str]
    content_type: str | None
    # Names of its user properties, each as often as it came.
    names: list[str]


class Subscriber:
    """Keeps its session, so that it gets what came while it or the broker was away, until its with statement ends."""

    def __init__(self, broker: Mosquitto, topic: str = "#", **login: str) -> None:
        self.received: list[Received] = []
        self._subscribed = threading.Event()
        self._broker = broker
        self._topic = topic
        self._client = client = make_client(f"subscriber-{uuid.uuid4().hex[:8]}")
        client.reconnect_delay_set(1, 1)
        client.on_connect = self._connected
        client.on_subscribe = lambda *_: self._subscribed.set()
        client.on_message = lambda _client, _userdata, message: self.received.append(_received(message))
        if login:
            client.username_pw_set(**login)
        if broker.certificate is not None:
            own = str(broker.certificate.certificate)
            client.tls_set(own, own, str(broker.certificate.key), ssl.CERT_REQUIRED)

    def wait_for(self, count: int) -> list[Received]:
        wait_until(lambda: len(self.received) >= count, f"{count} received messages")
        return self.received

    def leave(self) -> None:
        """It is away until its with statement ends."""
        self._client.disconnect(properties=self._expiry(3600, PacketTypes.DISCONNECT))
        self._client.loop_stop()

    def __enter__(self) -> Self:
        # mosquitto 2.0.11 doesn't write down a session that began with a clean start.
        self._client.connect("127.0.0.1", self._broker.port, clean_start=False, properties=self._expiry(3600))
        self._client.loop_start()
        assert self._subscribed.wait(patience()), "not subscribed"
        return self

    def __exit__(self, *unused: object) -> None:
        self._client.disconnect(properties=self._expiry(0, PacketTypes.DISCONNECT))
        self._client.loop_stop()

    def _expiry(self, seconds: int, packet: int = PacketTypes.CONNECT) -> Properties:
        properties = Properties(packet)
        properties.SessionExpiryInterval = seconds
        return properties

    def _connected(self, client: paho.Client, *_: Any) -> None:
        client.subscribe(self._topic, qos=2)


def _received(message: paho.MQTTMessage) -> Received:
    properties = message.properties
    pairs = getattr(properties, "UserProperty", [])
    content_type = getattr(properties, "ContentType", None)
    return Received(
        message.topic,
        message.payload,
        message.qos,
        bool(message.retain),
        dict(pairs),
        content_type,
        [name for name, _ in pairs],
    )
