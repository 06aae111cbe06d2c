"""Packs a folder into a zip archive that depends on its files alone: in order, with their times, without owners."""

from __future__ import annotations

import sys
import time
import zipfile
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with zipfile.ZipFile(f"{folder}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            status = path.stat()
            entry = zipfile.ZipInfo(str(path) + ("/" if path.is_dir() else ""), time.gmtime(status.st_mtime)[:6])
            entry.external_attr = status.st_mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, b"" if path.is_dir() else path.read_bytes(), compresslevel=9)
