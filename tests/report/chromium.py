"""A headless Chromium driven by its DevTools protocol over two pipes; the standard library and a browser suffice."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--disable-background-networking",
)


def find_chromium() -> str | None:
    """The browser's path: CHROMIUM, or the first of the usual names."""
    given = os.environ.get("CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one tab. `problems` collects console errors, exceptions and requests to a network."""

    def __init__(self, path: str, timeout_s: float = 60) -> None:
        self.problems: list[str] = []
        self._timeout_s = timeout_s
        self._count = 0
        self._events: list[Mapping[str, Any]] = []
        self._rest = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads its file descriptor 3 and writes 4.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [path, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, "bash", *arguments], pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        target = next(item for item in self._tabs() if item["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def _tabs(self) -> list[Mapping[str, Any]]:
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            tabs: list[Mapping[str, Any]] = self.call("Target.getTargets")["targetInfos"]
            if any(item["type"] == "page" for item in tabs):
                return tabs
            time.sleep(0.05)
        raise TimeoutError("the browser opened no tab")

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol; returns its result."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> Mapping[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: Mapping[str, Any] = json.loads(line)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: Mapping[str, Any]) -> None:
        method, given = event["method"], event["params"]
        self._events.append(event)
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.problems.append(str(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.problems.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent" and given["request"]["url"].startswith("http"):
            self.problems.append(f"request of {given['request']['url']}")

    def open(self, path: Path) -> float:
        """Loads a file; returns the seconds until its scripts have run and a frame after it is drawn."""
        self._events.clear()
        begin = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - begin

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, expression: str) -> float:
        """Waits until the expression is true; returns the seconds."""
        begin = time.monotonic()
        while not self.run(expression):
            if time.monotonic() - begin > self._timeout_s:
                raise TimeoutError(expression)
            time.sleep(0.01)
        return time.monotonic() - begin

    def show(self, width: int, height: int, *, scheme: str = "light", scale: float = 1.0, mobile: bool = False) -> None:
        """Size of the window in CSS pixels, and the system's colour scheme, "light" or "dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=mobile)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)

    def screenshot(self, path: Path, *, clip: tuple[float, float, float, float] | None = None) -> None:
        """The window as PNG, or the part (x, y, width, height) of the page."""
        parameters: dict[str, Any] = {"format": "png"}
        if clip is not None:
            x, y, width, height = clip
            parameters |= {
                "clip": {"x": x, "y": y, "width": width, "height": height, "scale": 1},
                "captureBeyondViewport": True,
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"]))

    def pdf(self) -> bytes:
        """The page as it prints, on A4."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False,
                            preferCSSPageSize=True)  # fmt: skip
        return base64.b64decode(printed["data"])
