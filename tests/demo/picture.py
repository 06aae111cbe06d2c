"""`make screenshot`: plays the demo up to its outage and prints the pictures of the console, light and dark, as an archive."""

from __future__ import annotations

import io
import json
import struct
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

from support.browser import SCHEMES, Browser
from support.cluster import Cluster
from support.console import Console

from demo.__main__ import DATABASE, start, stop

ROLE = "anna"
PASSWORD = "for the picture alone"
SIZE = (1280, 820)
# Where a picture says what it shows. Readers of PNG skip chunks that they don't know.
LABEL = b"Description"
# 8 bytes of signature, then the header's chunk, which comes first.
END_OF_HEADER = 33


def label(picture: bytes, shown: object) -> bytes:
    """The picture with what it shows, as JSON in a text chunk."""
    body = b"tEXt" + LABEL + b"\0" + json.dumps(shown).encode("ascii")
    chunk = struct.pack("!I", len(body) - 4) + body + struct.pack("!I", zlib.crc32(body))
    return picture[:END_OF_HEADER] + chunk + picture[END_OF_HEADER:]


def read_label(picture: bytes) -> dict[str, object]:
    (length,) = struct.unpack("!I", picture[END_OF_HEADER : END_OF_HEADER + 4])
    start = END_OF_HEADER + 8
    assert picture[start - 4 : start] == b"tEXt"
    shown: dict[str, object] = json.loads(picture[start : start + length].removeprefix(LABEL + b"\0"))
    return shown


def take(cluster: Cluster, folder: Path) -> dict[str, bytes]:
    """The console's first page, as an administrator sees it."""
    with cluster.connect(DATABASE) as db:
        db.execute(f"create role {ROLE} login password '{PASSWORD}' in role ulak_admin")  # type: ignore[arg-type]
    # The console refuses a server that asks for no password.
    rules = cluster.data / "pg_hba.conf"
    rules.write_text(f"local all {ROLE} scram-sha-256\n" + rules.read_text())
    cluster.reload()
    pictures = {}
    with Console(cluster, DATABASE, folder / "console.log") as console, Browser(*SIZE) as browser:
        browser.open(console.origin)
        browser.type("[name=role]", ROLE)
        browser.type("[name=password]", PASSWORD)
        browser.follow("main button")
        for scheme in sorted(SCHEMES):
            browser.colours(scheme)
            browser.open(console.origin)
            names = "[...document.querySelectorAll('[data-endpoint]')].map(each => each.dataset.endpoint)"
            shown = {"title": browser.ask("document.title"), "endpoints": sorted(set(browser.ask(names)))}
            picture = browser.screenshot(folder / f"console-{scheme}.png", full=False)
            pictures[picture.name] = label(picture.read_bytes(), {**shown, "scheme": scheme})
    return pictures


def main() -> None:
    # What the demo prints is for people; the archive is for `make`.
    archive, sys.stdout = sys.stdout.buffer, sys.stderr
    pictures: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        start(with_nodes=False, in_the_outage=lambda cluster: pictures.update(take(cluster, Path(folder))))
    stop()
    with tarfile.open(fileobj=archive, mode="w|") as tar:
        for name, picture in pictures.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(picture)
            tar.addfile(entry, io.BytesIO(picture))


if __name__ == "__main__":
    main()
