"""Parses the config of an http endpoint."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ulak.messages import cloudevents
from ulak.messages.delivery import EndpointConfig
from ulak.safety.mask import Mask
from ulak.transports.http import batch, header, secrecy, signature, template
from ulak.transports.http.model import (
    Basic,
    Bearer,
    ConfigError,
    Endpoint,
    Line,
    OAuth2,
    Profile,
    Proxy,
    Settings,
    Signature,
    SigningKey,
    SigV4,
    is_tls,
    origin,
)
from ulak.transports.http.template import Template

METHODS = ("POST", "PUT", "PATCH", "DELETE")
# How much of an uncaptured answer an error message quotes.
EXCERPT = 512
# How much of the answer to a batch is read: it may name the messages that failed.
_BATCH_ANSWER = 1024 * 1024
# More than any sane token answer.
_TOKEN_ANSWER = 65536
# At most this many different configs are cached.
_MOST_COMMON = 1024


def parse(config: EndpointConfig, settings: Settings | None = None) -> Endpoint:
    """Raises ConfigError; the database has checked the config already, but not with this code."""
    return Parser(settings).parse(config)


class Parser:
    """Parses many configs. Most differ only in URL and signing secret, so the rest is parsed once and shared."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._common: dict[tuple[bool, str], Endpoint] = {}

    def parse(self, config: EndpointConfig) -> Endpoint:
        given = config.keys()
        url = _url(given.get("url"), "url")
        common = self._common_of(config, given, url)
        signing = tuple(config.signing_secrets) or tuple(filter(None, (given.get("signing_secret"),)))

        def hidden() -> list[str]:
            secrets = secrecy.secrets(given, signing, config.secrets)
            return [*secrets, *secrecy.credentials(common.lines, common.signature)]

        return common._replace(
            config=config,
            profile=common.profile.at(url),
            signing_keys=_signing_keys(common.signature, signing) if signing else (),
            mask=Mask(hidden),
            private=Mask(lambda: [*hidden(), *secrecy.locations(given)]),
        )

    def _common_of(self, config: EndpointConfig, given: Mapping[str, Any], url: str) -> Endpoint:
        """The options that it shares with other endpoints."""
        rest = {key: value for key, value in given.items() if key not in ("url", "signing_secret")}
        key = is_tls(url), repr(rest)
        common = self._common.get(key)
        if common is None:
            common = _parse(config, given, url, self._settings)
            # Secrets are looked for when a text is masked, and once here: if that fails for a config, only its own
            # endpoint is affected.
            {*secrecy.secrets(given, (), ()), *secrecy.credentials(common.lines, common.signature)}
            {*secrecy.locations(given)}
            if len(self._common) >= _MOST_COMMON:
                self._common.clear()
            self._common[key] = common
        return common


def _parse(config: EndpointConfig, given: Mapping[str, Any], url: str, settings: Settings) -> Endpoint:
    batch_size, batch_format = _batching(given)
    has_events = given.get("cloudevents") or (batch_size > 1 and batch_format == "cloudevents")
    profile = _profile(given, url, settings, _BATCH_ANSWER if batch_size > 1 else EXCERPT)
    auth = _auth(given.get("auth"))
    headers = _headers(given, settings, auth)
    return Endpoint(
        config=config,
        profile=profile,
        headers=MappingProxyType(headers),
        lines=tuple(headers.values()),
        signature=_signature(given.get("signature")),
        template=_template(given["body"], headers) if "body" in given else None,
        templates={name: _template(body, headers) for name, body in given.get("bodies", {}).items()},
        auth=auth,
        token_profile=_token_profile(profile, auth),
        cloudevents=cloudevents.parse(given, settings.cloudevents_source) if has_events else None,
        batch_size=batch_size,
        batch_format=batch_format,
        retry_on=frozenset(str(status) for status in given.get("retry_on", ())),
        permanent_on=frozenset(str(status) for status in given.get("permanent_on", ())),
    )


def _template(body: Any, headers: Mapping[str, Line]) -> Template:
    return template.parse(body, header.split(headers["content-type"])[1])


def _signing_keys(scheme: Signature | None, secrets: Iterable[str]) -> tuple[SigningKey, ...]:
    return tuple(signature.key(secret) if scheme is None else secret.encode() for secret in secrets)


def _profile(config: Mapping[str, Any], url: str, settings: Settings, keep_body: int) -> Profile:
    method = str(config.get("method", "POST")).upper()
    if method not in METHODS:
        raise ConfigError(f"method {method} isn't one of {', '.join(METHODS)}")
    timeout = float(config.get("timeout", settings.http_timeout))
    return Profile(
        url=url,
        method=method,
        timeout=timeout,
        connect_timeout=min(timeout, float(config.get("connect_timeout", settings.http_connect_timeout))),
        ssl_verify=bool(config.get("ssl_verify", True)),
        tls_ca_bundle=config.get("tls_ca_bundle"),
        tls_client_cert=config.get("tls_client_cert"),
        tls_client_key=config.get("tls_client_key"),
        tls_pinned_public_key=config.get("tls_pinned_public_key"),
        proxy=_proxy(config.get("proxy")),
        capture_response=settings.capture_response,
        keep_body=settings.response_body_max_size if settings.capture_response else keep_body,
    )


def _batching(config: Mapping[str, Any]) -> tuple[int, str]:
    """How many messages a request carries at most, and in which format."""
    size = int(config.get("batch_size", 1))
    form = str(config.get("batch_format", "cloudevents" if config.get("cloudevents") else "json"))
    return min(size, batch.MAX_IDS) if form == "json" else size, form


def _url(url: Any, key: str) -> str:
    problem = _origin_problem(origin(url)) if isinstance(url, str) else "isn't a URL"
    if problem:
        raise ConfigError(f"{key} {problem}")
    return str(url)


@lru_cache(maxsize=1024)
def _origin_problem(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
        host, user = parts.hostname, parts.username
    except ValueError:
        return "isn't a URL"
    if parts.scheme not in ("http", "https") or not host:
        return "must start with http:// or https:// and have a host"
    return None if user is None else "must not have a user or a password"


def _proxy(config: Mapping[str, Any] | None) -> Proxy | None:
    if not config:
        return None
    return Proxy(
        url=_url(config.get("url"), "proxy.url"),
        username=config.get("username"),
        password=config.get("password"),
        no_proxy=config.get("no_proxy"),
        ca_bundle=config.get("ca_bundle"),
        ssl_verify=bool(config.get("ssl_verify", True)),
    )


def _auth(config: Mapping[str, Any] | None) -> Basic | Bearer | OAuth2 | SigV4 | None:
    if not config:
        return None
    fields = {key: value for key, value in config.items() if key != "type"}
    kinds: dict[Any, type[Basic | Bearer | OAuth2 | SigV4]] = {
        "basic": Basic,
        "bearer": Bearer,
        "oauth2": OAuth2,
        "aws_sigv4": SigV4,
    }
    kind = kinds.get(config.get("type"))
    if kind is None:
        raise ConfigError(f"auth.type {config.get('type')} isn't one of {', '.join(kinds)}")
    try:
        auth = kind(**fields)
    except TypeError as error:
        raise ConfigError(f"auth: {error}") from error
    if isinstance(auth, OAuth2):
        _url(auth.token_url, "auth.token_url")
    return auth


def _token_profile(profile: Profile, auth: object) -> Profile | None:
    """The endpoint's proxy and authorities, but neither its client certificate nor its pinned key."""
    if not isinstance(auth, OAuth2):
        return None
    return profile._replace(
        url=auth.token_url,
        method="POST",
        tls_client_cert=None,
        tls_client_key=None,
        tls_pinned_public_key=None,
        capture_response=False,
        keep_body=_TOKEN_ANSWER,
    )


def _headers(config: Mapping[str, Any], settings: Settings, auth: object) -> dict[str, Line]:
    headers: dict[str, Line] = {
        "user-agent": header.line("user-agent", settings.user_agent),
        "content-type": "content-type: application/json",
    }
    for name, value in config.get("headers", {}).items():
        problem = header.problem(name, value)
        if name.lower() in header.RESERVED:
            problem = "is a header that ulak sets itself"
        if problem:
            raise ConfigError(f"header {name!r} {problem}")
        headers[name.lower()] = header.line(name, value)
    if isinstance(auth, Bearer):
        headers["authorization"] = header.line("authorization", f"Bearer {auth.token}")
    elif isinstance(auth, Basic):
        pair = b64encode(f"{auth.username}:{auth.password}".encode()).decode()
        headers["authorization"] = header.line("authorization", f"Basic {pair}")
    return headers


def _signature(config: Mapping[str, Any] | None) -> Signature | None:
    """None: Standard Webhooks. Other schemes use the secret as it is written, even if it starts with whsec_."""
    scheme = (config or {}).get("scheme", "standard")
    if scheme in ("standard", "ed25519"):
        return None
    if scheme == "github":
        return Signature("x-hub-signature-256", "sha256=")
    try:
        return Signature(**{key: value for key, value in (config or {}).items() if key != "scheme"})
    except TypeError as error:
        raise ConfigError(f"signature: {error}") from error
