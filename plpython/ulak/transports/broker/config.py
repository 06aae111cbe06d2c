"""Keys that several brokers have in their configs, read in one way."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from ulak.messages import cloudevents
from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError, EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.broker import tls

# Seconds until a connection has to be there, if a config doesn't say.
CONNECT_TIMEOUT = 5.0


def host(given: Mapping[str, Any], key: str) -> str:
    """Raises ConfigError."""
    found = given.get(key)
    if not isinstance(found, str) or not found:
        raise ConfigError(f"{key} is required")
    return found


def tls_context(given: Mapping[str, Any], verify: bool = True) -> Callable[[], ssl.SSLContext] | None:
    """A function that creates the TLS context of a connection; None without "tls": true."""
    if not given.get("tls"):
        return None
    return functools.partial(tls.context, given.get("tls_ca_cert"), given.get("tls_cert"), given.get("tls_key"), verify)


def events(given: Mapping[str, Any], default_source: str) -> CloudEvents | None:
    """None: messages travel as they are."""
    return cloudevents.parse(given, default_source) if given.get("cloudevents") else None


def mask(config: EndpointConfig, password: object) -> Mask:
    """Hides the config's secrets, and a password that it contains as plain text."""
    return Mask([*config.secrets, *([password] if isinstance(password, str) else [])])
