"""An endpoint's config, parsed for its connection: the keys that several brokers share."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from typing import NamedTuple

from ulak.messages import cloudevents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.broker import tls
from ulak.transports.broker.route import Route

# Seconds to connect, unless the config says otherwise.
CONNECT_TIMEOUT = 5.0


class Defaults(NamedTuple):
    """Our version, which brokers are told, and defaults for endpoints."""

    version: str
    timeout: float
    cloudevents_source: str


class Address(NamedTuple):
    host: str
    port: int
    # Makes the TLS context: for each connection, since files change. Raises ConfigError.
    tls: Callable[[], ssl.SSLContext] | None = None
    # The name in the certificate; None: the host.
    name: str | None = None


class Target:
    """Parsed once per config_version. Each protocol has a subclass for its own keys."""

    # Messages that one delivery may carry.
    batch_size = 100
    # Keys whose values must not appear in errors.
    secret_keys: tuple[str, ...] = ("password",)

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        """Raises ConfigError; the database has checked the config already, but not with this code."""
        self.given = config.keys()
        passwords = [value for key in self.secret_keys if isinstance(value := self.given.get(key), str)]
        self.mask = Mask([*config.secrets, *passwords])
        # Seconds for a delivery, including connecting.
        self.timeout = float(self.given.get("timeout", defaults.timeout))
        self.connect_timeout = min(self.timeout, CONNECT_TIMEOUT)
        self.has_tls = bool(self.given.get("tls"))
        # None: messages aren't sent as CloudEvents.
        self.events = (
            cloudevents.parse(self.given, defaults.cloudevents_source) if self.given.get("cloudevents") else None
        )

    def address_of(self, key: str, port: int, tls_port: int, verify: bool = True) -> Address:
        """The host under this key, and the config's port or the protocol's default."""
        host = self.given.get(key)
        if not isinstance(host, str) or not host:
            raise ConfigError(f"{key} is required")
        default = tls_port if self.has_tls else port
        return Address(host, self.number("port", default, 1, 65535), self.tls(verify))

    def number(self, key: str, default: int, least: int, most: int) -> int:
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"{key} must be from {least} to {most}")
        return int(value)

    def listed(self, key: str) -> list[str]:
        """The elements of a list, or of a text with commas."""
        found = self.given.get(key)
        return (",".join(map(str, found)) if isinstance(found, list) else str(found or "")).split(",")

    def route(self, key: str, problem: Callable[[str], str | None]) -> Route:
        return Route(key, str(self.given.get(key, "")), problem, bool(self.given.get("allow_separators")))

    def tls(self, verify: bool = True) -> Callable[[], ssl.SSLContext] | None:
        if not self.has_tls:
            return None
        authorities, certificate, key = map(self.given.get, ("tls_ca_cert", "tls_cert", "tls_key"))
        return functools.partial(tls.context, authorities, certificate, key, verify)
