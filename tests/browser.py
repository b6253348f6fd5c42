"""A headless Chromium, driven over its own debugging pipe: pages are opened and asked with
JavaScript.

The protocol is https://chromedevtools.github.io/devtools-protocol/; over the pipe a message is
JSON that ends with a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A single page. ``said`` collects console errors and uncaught exceptions."""

    def __init__(self, program: str, profile: Path, width: int = 1600, height: int = 1400) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-renderer-backgrounding",
            "--disable-background-timer-throttling",
            "--disable-backgrounding-occluded-windows",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.bringToFront")  # a page in the background draws nothing

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(240.0)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, enough: Callable[[Any], bool], seconds: float = 240.0) -> Any:
        """The first value of ``script`` that is ``enough``."""
        end = time.monotonic() + seconds
        while (value := self._ask_unless_it_loads(script)) is None or not enough(value):
            assert time.monotonic() < end, (
                f"after {seconds} s the page still says {value!r}; its console: {self.said}"
            )
            time.sleep(0.1)
        return value

    def _ask_unless_it_loads(self, script: str) -> Any:
        """None where the page is just being replaced by the one that was opened."""
        try:
            return self.ask(script)
        except AssertionError as error:
            if not any(
                said in str(error)
                for said in ("navigated or closed", "Cannot find context", "context was destroyed")
            ):
                raise

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, f"the browser said nothing for {seconds} s"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.said.append(
                f"{details['text']} {details.get('exception', {}).get('description', '')}"
            )
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.said.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.said.append(
                " ".join(str(a.get("value", a.get("description"))) for a in parameters["args"])
            )
