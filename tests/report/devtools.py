"""A headless Chromium over its DevTools pipe: pages at any size and colour scheme, their keys, pointers, requests and complaints."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_SECONDS = 60


class Page:
    """One tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb", buffering=0)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Close the pipe."""
        self._answers.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive before it are stored."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._answers.read(1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str, *, width: int, dark: bool = False, media: str = "screen", script: bool = True) -> None:
        """Show ``address`` in a window of ``width`` and wait until it has loaded."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press one key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        fields = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, ord(name[0]))}
        text = {"text": "\r"} if name == "Enter" else {"text": name} if len(name) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def pointer(self, kind: str, x: float, y: float, *, clicks: int = 0) -> None:
        """Move or press the pointer: ``mouseMoved``, ``mousePressed`` or ``mouseReleased``."""
        pressed = "left" if clicks or kind != "mouseMoved" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=pressed, clickCount=clicks or 1)

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return what the page wrote to the console, or raised, and what the browser logged about it."""
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in wanted]

    def requests(self) -> list[str]:
        """Return the addresses that were requested."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in ``folder``, and end it after the block."""
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()

    def give() -> None:
        # The browser reads commands from 3 and writes answers to 4; either end may have one of these numbers, so move both away first.
        ends = os.dup(command_read), os.dup(answer_write)
        high = [os.dup2(end, 60 + place) for place, end in enumerate(ends)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=give,  # the only way to number them
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        page = Page(command_write, answer_read)
        yield page
        page.close()
    finally:
        os.close(command_write)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_SECONDS)
