"""python3 -m ulak_console: listens on ULAK_CONSOLE_LISTEN, which is 127.0.0.1:8321."""

from __future__ import annotations

import os
from typing import Any

import waitress  # type: ignore[import-untyped]
from waitress.channel import HTTPChannel  # type: ignore[import-untyped]

from ulak_console.app import create_app

# One more closes the connection that has been silent longest, so that idle connections lock nobody out.
MOST_CONNECTIONS = 400
SILENT_SECONDS = 30


class Channel(HTTPChannel):  # type: ignore[misc]
    def __init__(self, server: Any, *others: Any, **options: Any) -> None:
        silent = [each for each in server.active_channels.values() if not each.requests]
        if silent and len(server.active_channels) >= MOST_CONNECTIONS:
            min(silent, key=lambda each: each.last_activity).handle_close()
        super().__init__(server, *others, **options)


def main() -> None:
    sockets: dict[int, Any] = {}
    server = waitress.create_server(
        create_app(),
        map=sockets,
        listen=os.environ.get("ULAK_CONSOLE_LISTEN", "127.0.0.1:8321"),
        threads=8,
        ident=None,
        channel_timeout=SILENT_SECONDS,
        # Never reached: the silent ones go first.
        connection_limit=10 * MOST_CONNECTIONS,
        asyncore_use_poll=True,
    )
    for each in sockets.values():
        if hasattr(each, "channel_class"):
            each.channel_class = Channel
    server.run()


if __name__ == "__main__":
    main()
