"""Why a connection to a broker can't be used."""

from __future__ import annotations

import os
import ssl

from ulak.messages.delivery import RETRYABLE


class Lost(Exception):
    """The broker can't be reached, or the connection can't be used any longer: a text for people, and the prefix by
    which the database decides."""

    def __init__(self, problem: str, prefix: str = RETRYABLE) -> None:
        super().__init__(problem)
        self.prefix = prefix


def words(error: Exception) -> str:
    """The reason for a socket, resolver or TLS error. The text of any other error might quote a secret."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLEOFError):
        return "the connection was closed"
    if isinstance(error, ssl.SSLError):
        # For example "tlsv13 alert certificate required"; its errno isn't one of the system's.
        return str(error.reason or error.strerror or "the handshake failed").replace("_", " ").lower()
    if isinstance(error, OSError):
        return error.strerror or (os.strerror(error.errno) if error.errno else type(error).__name__)
    return type(error).__name__
