"""AWS Signature Version 4 of one request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlsplit

from ulak.transports.http.model import SigV4

_ALGORITHM = "AWS4-HMAC-SHA256"
_UNRESERVED = "-_.~"


def sign(auth: SigV4, method: str, url: str, headers: Mapping[str, str], body: bytes, now: float) -> dict[str, str]:
    """The headers to add. Signed are host, content-type and x-amz-* of the given headers (lower-case names)."""
    moment = datetime.fromtimestamp(now, UTC)
    stamp = moment.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    added = {"x-amz-date": stamp}
    if auth.session_token:
        added["x-amz-security-token"] = auth.session_token
    if auth.service == "s3":
        added["x-amz-content-sha256"] = digest

    signed = {name: value for name, value in headers.items() if name == "content-type" or name.startswith("x-amz-")}
    signed |= added | {"host": host(url)}
    names = ";".join(sorted(signed))
    request = "\n".join(
        (
            method,
            _path(url, auth.service),
            _query(url),
            *(f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)),
            "",
            names,
            digest,
        )
    )
    scope = f"{stamp[:8]}/{auth.region}/{auth.service}/aws4_request"
    text = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    signature = hmac.new(_key(auth, stamp[:8]), text.encode(), "sha256").hexdigest()
    added["authorization"] = (
        f"{_ALGORITHM} Credential={auth.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return added


def host(url: str) -> str:
    """The Host header that libcurl sends: without the scheme's own port."""
    parts = urlsplit(url)
    name = (parts.hostname or "").lower()
    if ":" in name:
        name = f"[{name}]"
    default = 443 if parts.scheme == "https" else 80
    return name if parts.port in (None, default) else f"{name}:{parts.port}"


def _key(auth: SigV4, day: str) -> bytes:
    key = ("AWS4" + auth.secret_key).encode()
    for part in (day, auth.region, auth.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _path(url: str, service: str) -> str:
    path = urlsplit(url).path or "/"
    # S3 signs the path as it is sent; the other services encode it once more.
    if service == "s3":
        return quote(unquote(path), safe="/" + _UNRESERVED)
    return quote(path, safe="/" + _UNRESERVED)


def _query(url: str) -> str:
    pairs = [pair.partition("=") for pair in urlsplit(url).query.split("&") if pair]
    encoded = sorted(
        (quote(unquote(name), safe=_UNRESERVED), quote(unquote(value), safe=_UNRESERVED)) for name, _, value in pairs
    )
    return "&".join(f"{name}={value}" for name, value in encoded)
