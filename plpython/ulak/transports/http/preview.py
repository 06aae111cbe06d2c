"""The request of one message as it would be sent now, without sending it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ulak.messages.delivery import EndpointConfig
from ulak.safety.mask import MASK
from ulak.transports.http import curl_command, endpoint, request
from ulak.transports.http.model import Message, OAuth2, Settings


def curl(given: Mapping[str, Any], now: float) -> str:
    """As a curl command. `given` holds endpoint, settings, version and message, as ulak.curl() gathers them."""
    config = EndpointConfig(**given["endpoint"])
    parsed = endpoint.parse(config, Settings.of(given["settings"], given["version"]))
    # The reader needn't see a real token, and fetching one would be a request.
    token = MASK if isinstance(parsed.auth, OAuth2) else None
    message = Message(**given["message"])
    raw = json.loads(message.payload)
    payloads = [message.payload, *([raw] if isinstance(raw, str) else [])]
    return curl_command.render(request.build(parsed, [message], now, token), parsed, payloads)
