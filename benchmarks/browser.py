"""Headless Chromium, driven over the pipe of its DevTools protocol: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
SECONDS = 60  # without an answer, after which it hangs
KEYS = {"Enter": "\r", " ": " "}  # keys with a text


class Browser:
    """A page in Chromium, with its profile in `folder`. `complaints` is what the page logged and threw so far."""

    def __init__(self, folder: Path):
        # Chromium reads commands from file descriptor 3 and answers on 4, as JSON with a zero byte after each.
        ends = [*os.pipe(), *os.pipe()]
        commands, answers = (fcntl(end, F_DUPFD, 10) for end in (ends[0], ends[3]))  # neither is 3 or 4 already
        self._to, self._from = ends[1], ends[2]
        redirected = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        command = ["bash", "-c", redirected, str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (ends[0], ends[3], commands, answers):
            os.close(end)
        self._buffer, self._last, self._session = b"", 0, ""
        self._loaded = False
        self.complaints: list[str] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(info["targetId"] for info in pages if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # Chromium ends with its pipe
        os.close(self._from)
        self._process.wait(timeout=60)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._last, "method": method, "params": parameters, **session}
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while (answer := self._receive()).get("id") != self._last:
            self._keep(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        parts = [self._buffer]
        while b"\0" not in parts[-1]:
            if not select.select([self._from], [], [], SECONDS)[0]:
                raise TimeoutError(f"Chromium has not answered for {SECONDS} s: {self.complaints}")
            parts.append(os.read(self._from, 1 << 20))
            if not parts[-1]:
                raise RuntimeError("Chromium has ended")
        message, _, self._buffer = b"".join(parts).partition(b"\0")
        return json.loads(message)

    def _keep(self, event: dict[str, Any]) -> None:
        content = event.get("params", {})
        if event.get("method") == "Page.loadEventFired":
            self._loaded = True
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(content["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str([value.get("value") for value in content["args"]]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(content["exceptionDetails"]))

    def open(self, page: Path, ready: str = "true") -> None:
        """Open a file, and wait until it is loaded and the expression `ready` is true."""
        self._loaded = False
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not self._loaded:
            self._keep(self._receive())
        look = f"const look = () => ({ready}) ? done() : setTimeout(look, 5); look();"
        self.evaluate(f"new Promise((done) => {{ {look} }})")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited, as JSON has it."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys by their DOM names, such as ArrowDown, one after another."""
        for key in keys:
            text = {"text": KEYS[key]} if key in KEYS else {}
            codes = {"Tab": 9, "Enter": 13, "Escape": 27}
            code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element, once the page has drawn what scrolling to it changes."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(1))))")
        x, y = self.evaluate(
            f"(() => {{ const box = {find}.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features: str) -> None:
        """Emulate media features, such as prefers_color_scheme="dark"."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=values)

    def picture(self, file: Path, selector: str | None = None) -> None:
        """Write a PNG of the whole page, or of an element."""
        clip = {}
        if selector is not None:
            box = self.evaluate(
                f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}; })()"
            )
            clip = {"clip": box}
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **clip)
        file.write_bytes(base64.b64decode(taken["data"]))
