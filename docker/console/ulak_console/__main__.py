"""python3 -m ulak_console: listens on ULAK_CONSOLE_LISTEN, which is 127.0.0.1:8321."""

from __future__ import annotations

import os

import waitress  # type: ignore[import-untyped]

from ulak_console.app import create_app

if __name__ == "__main__":
    waitress.serve(create_app(), listen=os.environ.get("ULAK_CONSOLE_LISTEN", "127.0.0.1:8321"), threads=8, ident=None)
