"""Signatures, as an independent library verifies them."""

from __future__ import annotations

from standardwebhooks import Webhook

from support.receiver import Received


def verifies(secret: str, request: Received) -> bool:
    try:
        return bool(Webhook(secret).verify(request.body, request.headers))
    except Exception:
        return False
