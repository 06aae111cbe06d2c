"""OAuth2 client credentials: the token request, its answer, and a cache of tokens until they expire."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import quote_plus, urlencode

from ulak.safety import text
from ulak.transports.http.model import Endpoint, Finished, Line, OAuth2, Request

# Seconds that a token without expires_in is used; the specification doesn't say.
_UNKNOWN_LIFE = 300
# A token isn't used in its last seconds, since the request must arrive while it is valid.
_MARGIN = 30
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Token(NamedTuple):
    value: str
    good_until: float


class TokenError(ValueError):
    """The token server's answer holds no usable token."""


class TokenCache:
    """Tokens by the credentials they were requested with, so that a changed secret requests a new one."""

    def __init__(self) -> None:
        self._tokens: dict[OAuth2, Token] = {}

    def get(self, auth: OAuth2, now: float) -> str | None:
        token = self._tokens.get(auth)
        return token.value if token is not None and now < token.good_until else None

    def put(self, auth: OAuth2, token: Token, now: float) -> None:
        # Drop expired tokens, so that rotated secrets don't fill the memory.
        self._tokens = {key: value for key, value in self._tokens.items() if now < value.good_until}
        self._tokens[auth] = token

    def discard(self, auth: OAuth2, value: str) -> None:
        """Drops a refused token, unless another request has replaced it already."""
        token = self._tokens.get(auth)
        if token is not None and token.value == value:
            del self._tokens[auth]


def token_request(endpoint: Endpoint, tag: object = None) -> Request:
    """Client id and secret are sent by HTTP Basic, which the specification requires of servers, or in the body."""
    auth = endpoint.auth
    assert isinstance(auth, OAuth2) and endpoint.token_profile is not None
    form = {"grant_type": "client_credentials"}
    if auth.scope:
        form["scope"] = auth.scope
    if auth.audience:
        form["audience"] = auth.audience
    lines: list[Line] = [
        "accept: application/json",
        endpoint.headers["user-agent"],
        "content-type: application/x-www-form-urlencoded",
    ]
    if auth.credentials == "body":
        form |= {"client_id": auth.client_id, "client_secret": auth.client_secret}
    else:
        pair = f"{quote_plus(auth.client_id)}:{quote_plus(auth.client_secret)}"
        lines.append("authorization: Basic " + b64encode(pair.encode()).decode())
    return Request(endpoint.token_profile, lines, urlencode(form).encode(), tag)


def parse(finished: Finished, now: float) -> Token:
    """The token in the answer. Errors quote the status and the server's error code, which may be any text."""
    if finished.kind is not None:
        raise TokenError(f"{finished.kind}: {finished.error}")
    try:
        answer = json.loads(finished.body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        answer = {}
    if not 200 <= finished.status < 300:
        code = answer.get("error")
        raise TokenError(f"HTTP {finished.status}" + (f": {text.line(code, 200)}" if isinstance(code, str) else ""))
    value = answer.get("access_token")
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise TokenError("the answer holds no access_token")
    try:
        life = float(answer.get("expires_in", _UNKNOWN_LIFE))
    except (TypeError, ValueError, OverflowError):
        life = _UNKNOWN_LIFE
    life = min(max(life, 0), 86400) if life == life else _UNKNOWN_LIFE
    return Token(value, now + life - min(_MARGIN, life / 10))
