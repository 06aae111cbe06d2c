"""The types of HTTP delivery: settings, endpoint, request, result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from ipaddress import ip_address
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from ulak.messages.cloudevents import CloudEvents
from ulak.messages.delivery import ConfigError as ConfigError
from ulak.messages.delivery import EndpointConfig
from ulak.messages.delivery import Message as Message
from ulak.messages.delivery import MessageError as MessageError
from ulak.messages.delivery import Outcome as Outcome
from ulak.safety.mask import Mask
from ulak.transports.http.template import Template

_NOTHING_SECRET = Mask()

# A header as libcurl takes it: "name: value"; bytes when it isn't ASCII.
Line = str | bytes


class Settings(NamedTuple):
    """Defaults for what an endpoint's config leaves open."""

    http_timeout: float = 10
    http_connect_timeout: float = 5
    capture_response: bool = False
    response_body_max_size: int = 65536
    cloudevents_source: str = "/ulak"
    user_agent: str = "ulak"

    @classmethod
    def of(cls, settings: Mapping[str, str], version: str) -> Settings:
        """From ulak.settings."""
        return cls(
            http_timeout=float(settings["http_timeout"]),
            http_connect_timeout=float(settings["http_connect_timeout"]),
            capture_response=settings["capture_response"] == "true",
            response_body_max_size=int(settings["response_body_max_size"]),
            cloudevents_source=settings["cloudevents_source"],
            user_agent=f"ulak/{version}",
        )


class Proxy(NamedTuple):
    url: str
    username: str | None = None
    password: str | None = None
    no_proxy: str | None = None
    ca_bundle: str | None = None
    ssl_verify: bool = True


class _Options(NamedTuple):
    url: str
    method: str = "POST"
    timeout: float = 10
    connect_timeout: float = 5
    ssl_verify: bool = True
    tls_ca_bundle: str | None = None
    tls_client_cert: str | None = None
    tls_client_key: str | None = None
    tls_pinned_public_key: str | None = None
    proxy: Proxy | None = None
    capture_response: bool = False
    keep_body: int = 512


class Profile(_Options):
    """libcurl's options for a receiver; set once per handle, not once per message."""

    @cached_property
    def shape(self) -> str:
        """The same for all profiles that differ in nothing but the rest of the URL: a handle that was prepared for one
        of them serves the others with another URL."""
        return repr((is_tls(self.url), self[1:]))

    def at(self, url: str) -> Profile:
        """The profile of the same shape with another URL."""
        profile = self._replace(url=url)
        profile.shape = self.shape
        return profile

    @cached_property
    def hosts(self) -> Sequence[str]:
        """Redirects aren't followed, so no other host is dialled."""
        urls = [self.url] if self.proxy is None else [self.url, self.proxy.url]
        return [host(origin(url)) for url in urls]

    @cached_property
    def is_named(self) -> bool:
        """Names have to be resolved."""
        return any(map(_is_name, self.hosts))


_ORIGIN = re.compile(r"[^/?#]*//[^/?#]*")


def is_tls(url: str) -> bool:
    return url[:6].lower() == "https:"


def origin(url: str) -> str:
    """Scheme and host."""
    found = _ORIGIN.match(url)
    return found[0] if found else url


@lru_cache(maxsize=1024)
def host(origin: str) -> str:
    return urlsplit(origin).hostname or ""


@lru_cache(maxsize=1024)
def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


class Basic(NamedTuple):
    username: str
    password: str


class Bearer(NamedTuple):
    token: str


class OAuth2(NamedTuple):
    token_url: str
    client_id: str
    client_secret: str
    scope: str | None = None
    audience: str | None = None
    # How client id and secret are sent: "header" (HTTP Basic) or "body".
    credentials: str = "header"


class SigV4(NamedTuple):
    access_key: str
    secret_key: str
    region: str
    service: str
    session_token: str | None = None


class Signature(NamedTuple):
    """An HMAC of the body alone, in a header of its own, as many receivers ask for it."""

    header: str
    prefix: str = ""
    encoding: str = "hex"
    algorithm: str = "sha256"


# The secret of an HMAC, or a function that signs with an Ed25519 key.
SigningKey = bytes | Callable[[bytes], bytes]


class Endpoint(NamedTuple):
    """An endpoint's config, parsed once per config_version."""

    config: EndpointConfig
    profile: Profile
    # By lower-case name; a message's own headers may replace some of them.
    headers: Mapping[str, Line]
    # The same as a tuple, for messages without headers of their own.
    lines: tuple[Line, ...]
    signing_keys: tuple[SigningKey, ...] = ()
    # None: Standard Webhooks.
    signature: Signature | None = None
    # None: the payload is the body.
    template: Template | None = None
    # Templates of subscriptions, by event type or pattern.
    templates: Mapping[str, Template] = MappingProxyType({})
    auth: Basic | Bearer | OAuth2 | SigV4 | None = None
    # The token request's own profile: the same proxy, another receiver.
    token_profile: Profile | None = None
    cloudevents: CloudEvents | None = None
    batch_size: int = 1
    batch_format: str = "json"
    retry_on: frozenset[str] = frozenset()
    permanent_on: frozenset[str] = frozenset()
    # Masks values that nobody may read; `private` also those that only roles with access to configs may read.
    mask: Mask = _NOTHING_SECRET
    private: Mask = _NOTHING_SECRET


class Request(NamedTuple):
    profile: Profile
    headers: list[Line]
    body: bytes
    # Handed back with the result; the client doesn't look at it.
    tag: object = None


class Finished(NamedTuple):
    """How an exchange ended: a status, or an error and its kind, or both if the answer broke off."""

    request: Request
    status: int
    # None | timeout | resolve | connect | blocked | tls | network | config
    kind: str | None = None
    error: str | None = None
    headers: tuple[bytes, ...] = ()
    body: bytes = b""
    truncated: bool = False
    # Total, and until the first byte of the answer; only measured for a captured response.
    seconds: float | None = None
    first_byte_seconds: float | None = None
