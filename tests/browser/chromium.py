"""A headless Chromium, driven over the DevTools protocol through a pair of pipes: no port, no driver, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """`with Chromium(program, folder) as browser:`. One page."""

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # It reads descriptor 3 and writes descriptor 4, which may be others' here: a shell puts them into place.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run",
                 "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
                 "--hide-scrollbars"]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # which does not run as root
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", program, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._session = ""
        self._buffer = b""
        self.complaints: list[str] = []
        """What the page threw, what it logged as an error, and what its policy forbade it."""

    def __enter__(self) -> Self:
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    # --- what is done to the page -----------------------------------------------------------------------------------

    def open(self, url: str, first: str = "") -> None:
        """A new page. `first`: a script that runs before any of its own."""
        prepared = self._ask("Page.addScriptToEvaluateOnNewDocument", source=first)["identifier"]
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")
        self._ask("Page.removeScriptToEvaluateOnNewDocument", identifier=prepared)

    def run(self, script: str) -> Any:
        """The script's value, awaited if it is a promise."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 60) -> Any:
        """The condition's first true value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"this never became true: {condition}\n{self.complaints}"
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._ask("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "End": 35, "Home": 36}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if ctrl else 0}
        self._ask("Input.dispatchKeyEvent", type="rawKeyDown", **event)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self._ask("DOM.getDocument")["root"]["nodeId"]
        node = self._ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._ask("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def hover(self, selector: str) -> None:
        at = self.run(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
                      " return [r.left + r.width / 2, r.top + r.height / 2]; })()")  # fmt: skip
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    # --- the pipes --------------------------------------------------------------------------------------------------

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        told: dict[str, Callable[[], str | None]] = {
            "Runtime.exceptionThrown": lambda: str(parameters["exceptionDetails"]),
            "Log.entryAdded": lambda: parameters["entry"]["text"] if parameters["entry"]["level"] == "error" else None,
            "Runtime.consoleAPICalled": lambda: str(parameters["args"]) if parameters["type"] == "error" else None,
        }
        with contextlib.suppress(KeyError):
            if complaint := told[event["method"]]():
                self.complaints.append(complaint)

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser has exited with {self._process.wait()}"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
