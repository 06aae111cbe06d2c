"""A request as a curl command."""

from __future__ import annotations

import shlex
from typing import Any

from ulak.transports.http import curl_command, request

NOW = 1_800_000_000


def test_the_command_holds_what_would_be_sent(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint("https://example.com/hook?a=b&c", method="PUT", headers={"X-Tenant": "it's"})

    words = shlex.split(curl_command.render(request.build(endpoint, [make_message(2)], NOW), endpoint, ()))

    assert words[:5] == ["curl", "--globoff", "--include", "--request", "PUT"]
    assert words[-1] == "https://example.com/hook?a=b&c"
    assert words[words.index("--data-raw") + 1] == '{"order": 1}'
    assert "x-tenant: it's" in words
    assert "webhook-id: 0190a5d2-5b9e-7000-8000-000000000002" in words


def test_no_secret_is_shown(make_endpoint: Any, make_message: Any) -> None:
    endpoint = make_endpoint(
        auth={"type": "bearer", "token": "hush-token"},
        secrets=["hush-signing"],
        headers={"X-Api-Key": "hush-key", "Cookie": "hush-cookie"},
        proxy={"url": "http://proxy.example.com", "username": "ada", "password": "hush-proxy"},
    )
    built = request.build(endpoint, [make_message()], NOW)
    signature = next(str(line) for line in built.headers if str(line).startswith("webhook-signature")).split(",")[1]

    command = curl_command.render(built, endpoint, ())

    assert "hush" not in command
    assert signature not in command
    assert "authorization: Bearer ****" in command
    assert "--proxy-user 'ada:****'" in command
