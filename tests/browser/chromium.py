"""A real headless Chromium, driven over its DevTools protocol through two pipes: no port is open.

    with Chromium(folder) as browser:
        page = browser.open(path)
        page.evaluate("document.title")

What the page printed, which errors it threw and which addresses it asked for is kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to 4, and nowhere else.
_START = (
    "import os, sys; a, b = map(int, sys.argv[1:3]);"
    "os.dup2(a, 103), os.dup2(b, 104), os.dup2(103, 3), os.dup2(104, 4);"
    "os.execvp(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The browser's program, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser process with a profile of its own."""

    def __init__(self, folder: Path, *, deadline: float = 600.0) -> None:
        self._ends = time.monotonic() + deadline
        commands, write = os.pipe()
        read, answers = os.pipe()
        program = find()
        assert program is not None
        words = [sys.executable, "-c", _START, str(commands), str(answers), program, *FLAGS]
        self.process = subprocess.Popen(
            [*words, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"HOME": str(folder), "TMPDIR": str(folder)},
        )
        os.close(commands)
        os.close(answers)
        self._read, self._write, self._buffer, self._count = read, write, b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(300)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events are kept meanwhile."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._count:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _next(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                if not selector.select(max(0.0, self._ends - time.monotonic())):
                    raise TimeoutError("Chromium gave no answer before the deadline")
                piece = os.read(self._read, 1 << 20)
                if not piece:
                    raise RuntimeError("Chromium has ended")
                self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def open(
        self, place: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Page:
        """A page of a file, or of an address of this machine, loaded."""
        address = place if isinstance(place, str) else place.resolve().as_uri()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        page.set_dark(dark)
        page.call("Page.navigate", url=address)
        page.wait("location.protocol !== 'about:' && document.readyState === 'complete'")
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, expression: str, deadline: float = 300.0) -> None:
        """Until an expression is true in the page."""
        ends = time.monotonic() + deadline
        while not self.evaluate(expression):
            if time.monotonic() > ends:
                raise TimeoutError(f"{expression} did not become true in {deadline:g} s")
            time.sleep(0.05)

    def set_dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.move_mouse(*start)
        pressed = {"button": "left", "buttons": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1],
                  clickCount=1, **pressed)  # fmt: skip
        for part in (0.3, 0.7, 1.0):
            x, y = (a + (b - a) * part for a, b in zip(start, end, strict=True))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **pressed)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1],
                  button="left", clickCount=1)  # fmt: skip

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as a PNG; `whole`: also what lies below the window."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        path.write_bytes(self.picture(whole=whole))

    def pdf(self) -> bytes:
        data = self.call("Page.printToPDF", printBackground=True, paperWidth=8.27,
                         paperHeight=11.69)["data"]  # fmt: skip
        return base64.b64decode(data)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings: thrown, printed, or of the browser about the page."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, data = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(data["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning"):
                found.append(str(data["args"]))
            elif method == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning"):
                found.append(str(data["entry"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.browser.events
            if event.get("method") == "Network.requestWillBeSent"
            and event.get("sessionId") == self.session
        ]
