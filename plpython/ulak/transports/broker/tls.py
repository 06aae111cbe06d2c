"""TLS to a broker, by the files that a config names."""

from __future__ import annotations

import ssl

from ulak.messages.delivery import ConfigError
from ulak.safety import files


def context(authorities: str | None, certificate: str | None, key: str | None, verify: bool = True) -> ssl.SSLContext:
    """Files are read each time. Without authorities, the system's are used. Raises ConfigError."""
    named = [
        (path, content)
        for path, content in (
            (authorities, files.CERTIFICATE),
            (certificate, files.CERTIFICATE),
            (key, files.PRIVATE_KEY),
        )
        if path is not None
    ]
    files.check(named)
    try:
        made = ssl.create_default_context(cafile=authorities)
        if not verify:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        if certificate is not None:
            # Without this, the library would ask for the key's passphrase at a terminal.
            made.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError):
        raise ConfigError(files.PROBLEM) from None
    return made
