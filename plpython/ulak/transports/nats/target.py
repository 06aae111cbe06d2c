"""The config of a nats endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety import files
from ulak.transports.broker import target as broker
from ulak.transports.broker.target import Address, Defaults
from ulak.transports.nats import keys
from ulak.transports.nats.servers import Servers
from ulak.transports.nats.servers import parse as parse_server
from ulak.transports.registry import missing_client

# A line has at most 4096 bytes, including the reply subject.
LONGEST_SUBJECT = 1024
# Milliseconds between pings over a connection, and how many may be unanswered.
PING_INTERVAL = 60_000
MOST_PINGS = 2

# Whitespace, wildcards, and tokens that are empty.
_FORBIDDEN = re.compile(r"[\s*>]|^\.|\.\.|\.$")
# Messages to these control the server, or answer in its place. Key-value buckets ($KV) are streams.
_OWN = re.compile(r"\$(?!KV\.)|_INBOX\.")


class Target(broker.Target):
    secret_keys = ("token", "password", "nkey_seed")

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        given = self.given
        if package := missing_client("nats", given):
            raise ConfigError(f"{package} isn't installed where the worker runs, and signing with an nkey needs it")
        found = [parse_server(each) for each in self.listed("url")]
        self.has_tls = self.has_tls or any(secure for _, _, secure in found)
        context = self.tls()
        self.servers = Servers([Address(host, port, context) for host, port, _ in found])
        self.subject = self.route("subject", subject_problem)
        # True: wait for the stream's acknowledgement. False: wait for the server's answer to a ping.
        self.jetstream = bool(given.get("jetstream", True))
        # The stream that must accept the messages.
        self.stream: str | None = given.get("stream")
        # The config's headers, for every message.
        self.headers: Mapping[str, str] = given.get("headers", {})
        options = given.get("options", {})
        self.ping_seconds = int(options.get("ping_interval", PING_INTERVAL)) / 1000
        self.most_pings = int(options.get("max_pings_out", MOST_PINGS))

    @property
    def address(self) -> Address:
        """The server to try first."""
        return next(self.servers.in_turn())

    def login(self, nonce: str) -> dict[str, str]:
        """The credentials in CONNECT. Raises ConfigError."""
        given = self.given
        if "credentials_file" in given:
            # Read for each connection, since such files are renewed.
            text = files.read(given["credentials_file"], files.NATS_CREDENTIALS).decode("ascii", "replace")
            jwt, seed = keys.credentials(text)
            return {"jwt": jwt, "sig": keys.signer(seed).sign(nonce)}
        if "nkey_seed" in given:
            signer = keys.signer(given["nkey_seed"])
            return {"nkey": signer.public, "sig": signer.sign(nonce)}
        if "token" in given:
            return {"auth_token": given["token"]}
        if "username" in given:
            return {"user": given["username"], "pass": given.get("password", "")}
        return {}


def subject_problem(subject: str) -> str | None:
    if not subject:
        return "must not be empty"
    if _FORBIDDEN.search(subject):
        return "must not have spaces, wildcards (* or >) or empty tokens"
    if _OWN.match(subject):
        return "must not be one of the server's own ($JS., $SYS., _INBOX.)"
    return None if len(subject.encode()) <= LONGEST_SUBJECT else f"must have at most {LONGEST_SUBJECT} bytes"
