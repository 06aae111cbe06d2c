"""The settings of delivery over HTTP, parsed from what the database tells."""

from __future__ import annotations

from collections.abc import Mapping

from ulak.transports.http.model import Settings


def endpoint_settings(settings: Mapping[str, str], version: str) -> Settings:
    return Settings(
        http_timeout=float(settings["http_timeout"]),
        http_connect_timeout=float(settings["http_connect_timeout"]),
        capture_response=settings["capture_response"] == "true",
        response_body_max_size=int(settings["response_body_max_size"]),
        cloudevents_source=settings["cloudevents_source"],
        user_agent=f"ulak/{version}",
    )
