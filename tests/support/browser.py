"""Headless Chromium: what it sees of a page, a picture of it, and somebody who types and clicks."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

from support.sessions import patience, wait_until

# Nothing of the browser itself goes out, and it may run as root.
COMMAND = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
SCHEMES = {"dark": "0", "light": "1"}


def _run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [*COMMAND, f"--user-data-dir={profile}", *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(), check=True)


def loaded(page: Path) -> str:
    """The document as the browser has built it."""
    return _run(page, "--dump-dom").stdout


def screenshot(page: Path, picture: Path, scheme: str, width: int = 1280, height: int = 2000) -> Path:
    _run(
        page,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
    )
    return picture


class Browser:
    """One window, driven by the DevTools protocol over a pair of pipes: requests and answers are JSON that ends with \\0."""

    def __init__(self, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._size = (width, height)
        self._scheme = scheme
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None

    def __enter__(self) -> Browser:
        # Chromium reads requests from descriptor 3 and writes answers to 4.
        theirs_in, self._requests = os.pipe()
        self._answers, theirs_out = os.pipe()
        command = [*COMMAND, f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.do("Page.enable")
        self.resize(*self._size)
        self.colours(self._scheme)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)
        self._folder.cleanup()

    def do(self, method: str, **parameters: Any) -> Any:
        """One request of the protocol. Events that come in between are left unread."""
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._unread:
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser is gone"
            self._unread += read
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)

    def resize(self, width: int, height: int) -> None:
        self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def colours(self, scheme: str) -> None:
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.mark()
        answer = self.do("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.wait_for_page()

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        return str(self.ask("document.body.innerText"))

    def type(self, selector: str, text: str) -> None:
        self.ask(f"{_find(selector)}.focus(); {_find(selector)}.value = ''")
        self.do("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """With the mouse, where it can be seen."""
        self.ask(f"{_find(selector)}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.ask(f"JSON.stringify({_find(selector)}.getBoundingClientRect())")
        place = json.loads(box)
        at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def follow(self, selector: str) -> None:
        """Clicks on what leads to another page, and waits for that."""
        self.mark()
        self.click(selector)
        self.wait_for_page()

    def mark(self) -> None:
        """A page that isn't loaded yet doesn't have it."""
        self.ask("window.isOld = true")

    def wait_for_page(self) -> None:
        wait_until(self._has_new_page, message="the next page")

    def _has_new_page(self) -> bool:
        answer = self.do("Runtime.evaluate", expression="!window.isOld && document.readyState === 'complete'")
        return bool(answer["result"].get("value"))

    def screenshot(self, picture: Path, full: bool = True) -> Path:
        data = self.do("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        picture.write_bytes(base64.b64decode(data))
        return picture


def _find(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"


def pixel(picture: Path, x: int, y: int) -> tuple[int, int, int]:
    """Of a PNG that Chromium wrote: 8 bits a channel, not interlaced."""
    data = picture.read_bytes()
    width, _, depth, kind = struct.unpack("!IIBB", data[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    size = 3 if kind == 2 else 4
    packed, place = b"", 8
    while place < len(data):
        (length,) = struct.unpack("!I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += length + 12
    raw = zlib.decompress(packed)
    row = bytearray(width * size)
    for line in range(y + 1):
        start = line * (width * size + 1)
        row = _unfilter(raw[start], raw[start + 1 : start + 1 + width * size], row, size)
    return row[x * size], row[x * size + 1], row[x * size + 2]


def _unfilter(kind: int, line: bytes, above: bytearray, size: int) -> bytearray:
    row = bytearray(line)
    for i in range(len(row)):
        left = row[i - size] if i >= size else 0
        up = above[i]
        corner = above[i - size] if i >= size else 0
        row[i] = (row[i] + (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]) & 255
    return row


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))
