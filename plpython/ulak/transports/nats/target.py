"""An endpoint's config of protocol nats, made into what its connection works with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety import files
from ulak.safety.mask import Mask
from ulak.transports.broker import config as keys
from ulak.transports.broker.connection import Address
from ulak.transports.broker.route import Route
from ulak.transports.nats.servers import Servers
from ulak.transports.nats.servers import parse as parse_server
from ulak.transports.registry import missing_client

# Messages in one delivery (make bench ARGS=brokers:nats).
BATCH_SIZE = 100
# A server takes lines of 4096 bytes, in which the subject of the reply stands, too.
LONGEST_SUBJECT = 1024
# Milliseconds between pings over a connection, and how many may be unanswered.
PING_INTERVAL = 60_000
MOST_PINGS = 2

# Whitespace, wildcards, and tokens that are empty.
_FORBIDDEN = re.compile(r"[\s*>]|^\.|\.\.|\.$")
# Publishing there commands the server, or answers in its place. Key-value buckets are streams.
_OWN = re.compile(r"\$(?!KV\.)|_INBOX\.")


class Login(NamedTuple):
    """One of them, or none."""

    token: str | None = None
    username: str | None = None
    password: str | None = None
    seed: str | None = None
    credentials_file: str | None = None


class Target(NamedTuple):
    servers: Servers
    subject: Route
    # The publisher waits for the stream's acknowledgement; else for the server's answer to a ping.
    jetstream: bool
    # The stream that has to take the messages.
    stream: str | None
    login: Login
    has_tls: bool
    # The config's headers, for every message.
    headers: Mapping[str, str]
    events: CloudEvents | None
    mask: Mask
    ping_seconds: float
    most_pings: int
    connect_timeout: float
    timeout: float
    batch_size: int = BATCH_SIZE


def parse(config: EndpointConfig, default_timeout: float, default_source: str) -> Target:
    """Raises ConfigError; the database has checked the config already, but not with this code."""
    given = config.keys()
    if package := missing_client("nats", given):
        raise ConfigError(f"{package} isn't installed where the worker runs, and signing with an nkey needs it")
    timeout = float(given.get("timeout", default_timeout))
    options = given.get("options", {})
    login = Login(
        given.get("token"),
        given.get("username"),
        given.get("password"),
        given.get("nkey_seed"),
        given.get("credentials_file"),
    )
    addresses = _addresses(given)
    return Target(
        servers=Servers(addresses),
        subject=Route("subject", str(given.get("subject", "")), subject_problem, bool(given.get("allow_separators"))),
        jetstream=bool(given.get("jetstream", True)),
        stream=given.get("stream"),
        login=login,
        has_tls=addresses[0].tls is not None,
        headers=given.get("headers", {}),
        events=keys.events(given, default_source),
        mask=Mask([*config.secrets, *(each for each in (login.token, login.password, login.seed) if each is not None)]),
        ping_seconds=int(options.get("ping_interval", PING_INTERVAL)) / 1000,
        most_pings=int(options.get("max_pings_out", MOST_PINGS)),
        connect_timeout=min(timeout, keys.CONNECT_TIMEOUT),
        timeout=timeout,
    )


def _addresses(given: Mapping[str, Any]) -> list[Address]:
    urls = given.get("url")
    listed = ",".join(map(str, urls)) if isinstance(urls, list) else str(urls or "")
    found = [parse_server(each) for each in listed.split(",")]
    has_tls = given.get("tls") or any(secure for _, _, secure in found)
    context = keys.tls_context({**given, "tls": has_tls})
    return [Address(host, port, context) for host, port, _ in found]


def subject_problem(subject: str) -> str | None:
    if not subject:
        return "must not be empty"
    if _FORBIDDEN.search(subject):
        return "must not have spaces, wildcards (* or >) or empty tokens"
    if _OWN.match(subject):
        return "must not be one of the server's own ($JS., $SYS., _INBOX.)"
    return None if len(subject.encode()) <= LONGEST_SUBJECT else f"must have at most {LONGEST_SUBJECT} bytes"


def read_credentials(path: str) -> str:
    """Raises ConfigError. Read anew for each connection, since such files are renewed."""
    return files.read(path, files.NATS_CREDENTIALS).decode("ascii", "replace")
