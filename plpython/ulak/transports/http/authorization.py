"""The Authorization header of basic and bearer authentication."""

from __future__ import annotations

from base64 import b64encode

from ulak.transports.http.model import Basic, Bearer


def value(auth: Basic | Bearer) -> str:
    if isinstance(auth, Bearer):
        return f"Bearer {auth.token}"
    return "Basic " + b64encode(f"{auth.username}:{auth.password}".encode()).decode()
