"""The values that cross borders: settings, endpoint, message, request, what came back, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ulak.mask import Mask

_NOTHING_SECRET = Mask()

# A header as libcurl takes it: "name: value"; bytes when it isn't ASCII.
Line = str | bytes


class ConfigError(ValueError):
    """An endpoint's config can't be used; nothing is wrong with the message."""


class MessageError(ValueError):
    """A message can't be sent as it is, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults for what an endpoint's config leaves open."""

    http_timeout: float = 10
    http_connect_timeout: float = 5
    capture_response: bool = False
    response_body_max_size: int = 65536
    cloudevents_source: str = "/ulak"
    user_agent: str = "ulak"


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    username: str | None = None
    password: str | None = None
    no_proxy: str | None = None
    ca_bundle: str | None = None
    ssl_verify: bool = True


# Compared by identity: a handle prepared for one profile serves exactly that profile.
@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What libcurl must know about a receiver; set once per handle, not once per message."""

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


@dataclass(frozen=True, slots=True)
class Basic:
    username: str
    password: str


@dataclass(frozen=True, slots=True)
class Bearer:
    token: str


@dataclass(frozen=True, slots=True)
class OAuth2:
    token_url: str
    client_id: str
    client_secret: str
    scope: str | None = None
    audience: str | None = None
    # Where client id and secret go: "header" (HTTP Basic) or "body".
    credentials: str = "header"


@dataclass(frozen=True, slots=True)
class SigV4:
    access_key: str
    secret_key: str
    region: str
    service: str
    session_token: str | None = None


@dataclass(frozen=True, slots=True)
class CloudEvents:
    mode: str
    source: str
    type: str | None = None
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """An HMAC of the body alone, in a header of its own, as many receivers ask for it."""

    header: str
    prefix: str = ""
    encoding: str = "hex"
    algorithm: str = "sha256"


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """An endpoint's config, parsed once per config_version."""

    id: int
    name: str
    config_version: int
    profile: Profile
    # By lower-case name; a message's own headers may replace some of them.
    headers: Mapping[str, Line]
    # The same, ready to send when the message brings no header of its own.
    lines: tuple[Line, ...]
    signing_keys: tuple[bytes, ...] = ()
    # None: Standard Webhooks.
    signature: Signature | None = None
    auth: Basic | Bearer | OAuth2 | SigV4 | None = None
    # The token request's own profile: the same proxy, another receiver.
    token_profile: Profile | None = None
    cloudevents: CloudEvents | None = None
    batch_size: int = 1
    batch_format: str = "json"
    max_in_flight: int | None = None
    retry_on: frozenset[str] = frozenset()
    permanent_on: frozenset[str] = frozenset()
    # What nobody may read, and what only those may read who may see configs.
    mask: Mask = _NOTHING_SECRET
    private: Mask = _NOTHING_SECRET


# The types made for every message are named tuples: a frozen dataclass costs four times as much to make.
class Message(NamedTuple):
    """One claimed message; payload, headers and metadata are JSON text as the database gives them."""

    id: int
    message_id: str
    attempt: int
    payload: str
    headers: str | None = None
    metadata: str | None = None
    correlation_id: str | None = None
    ordering_key: str | None = None
    created_at: str | None = None
    # Why the database could not hand it out; the payload is empty then.
    problem: str | None = None


class Request(NamedTuple):
    profile: Profile
    headers: list[Line]
    body: bytes
    # Handed back with the answer; the transport doesn't look at it.
    tag: object = None


class Finished(NamedTuple):
    """How one exchange ended: a status, or an error and its kind, or both when the answer broke off."""

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


class Outcome(NamedTuple):
    """What the database is told: error is None for delivered, else it starts with [RETRYABLE] or its siblings."""

    error: str | None = None
    retry_after: int | None = None
    # JSON text, only with capture_response.
    response: str | None = None
    status: int = 0
