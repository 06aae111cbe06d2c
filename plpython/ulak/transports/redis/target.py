"""The config of a redis endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.transports.broker import target as broker
from ulak.transports.broker.target import CONNECT_TIMEOUT, Defaults

PORT = 6379
COMMAND_TIMEOUT = 10.0
# Messages in one delivery. A message took 66, 64 and 60 us of a worker's processor with 20, 100 and 500 of them (`make
# bench ARGS=brokers:redis`); with fewer, an outcome is stored sooner.
BATCH_SIZE = 100
LONGEST_KEY = 1024

_MINID = re.compile(r"\d{1,20}(-\d{1,20})?")


class Target(broker.Target):
    batch_size = BATCH_SIZE

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        given = self.given
        self.address = self.address_of("host", PORT, PORT)
        self.connect_timeout = float(given.get("connect_timeout", CONNECT_TIMEOUT))
        self.command_timeout = float(given.get("command_timeout", COMMAND_TIMEOUT))
        self.timeout = self.connect_timeout + self.command_timeout
        # Commands that the server must accept before messages are sent.
        self.greeting = _greeting(given)
        self.stream = self.route("stream_key", _problem)
        # XADD's arguments between the stream and the fields.
        self.options = _options(given)


def _greeting(given: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    commands: list[tuple[str, ...]] = []
    if given.get("password") is not None:
        login = [given["username"]] if given.get("username") else []
        commands.append(("AUTH", *login, str(given["password"])))
    if given.get("db"):
        commands.append(("SELECT", str(int(given["db"]))))
    # PING shows whether the server wants a password or isn't ready. Without a login, XADD would get the misleading
    # answer that it has too many arguments.
    return tuple(commands) or (("PING",),)


def _options(given: Mapping[str, Any]) -> tuple[bytes, ...]:
    options: list[bytes] = [b"NOMKSTREAM"] if given.get("nomkstream") else []
    # Trimming to whole nodes of the stream costs next to nothing.
    how = b"~" if given.get("maxlen_approximate", True) else b"="
    if given.get("maxlen") is not None:
        options += (b"MAXLEN", how, b"%d" % int(given["maxlen"]))
    elif given.get("minid") is not None:
        minid = str(given["minid"])
        if not _MINID.fullmatch(minid):
            raise ConfigError("minid isn't the id of an entry")
        options += (b"MINID", how, minid.encode())
    # The server chooses the entry's id.
    return (*options, b"*")


def _problem(key: str) -> str | None:
    if not key:
        return "must not be empty"
    return None if len(key) <= LONGEST_KEY else f"must have at most {LONGEST_KEY} characters"
