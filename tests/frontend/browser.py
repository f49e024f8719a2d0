"""A headless Chromium, spoken to over two pipes in its own protocol (CDP): no driver in between.

Debian's `chromium` is enough, nothing comes from a registry. Tests that need it skip without.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

Json = dict[str, object]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "chromium is not installed (Debian: chromium)"
# Far above what anything takes here; two cores are shared with other tests.
ANSWER_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.03
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in containers; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
)
DESK, PHONE = (1200, 900), (360, 740)
# What the pipe uses: commands are read from 3, answers written to 4.
COMMANDS_FD, ANSWERS_FD = 3, 4


class Browser:
    """One Chromium. Messages end with a zero byte; events are kept until their tab asks."""

    def __init__(self, commands_fd: int, answers_fd: int) -> None:
        self._commands_fd = commands_fd
        self._answers_fd = answers_fd
        self._rest = b""
        self._next_id = 1
        self.events: list[Json] = []

    def call(self, method: str, session: str | None = None, **params: object) -> Json:
        """Raises: AssertionError if the browser refuses."""
        call_id = self._next_id
        self._next_id += 1
        message: Json = {"id": call_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands_fd, json.dumps(message).encode() + b"\0")
        end_at = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            answer = self._receive(end_at, method)
            if answer.get("id") == call_id:
                assert "error" not in answer, (method, answer["error"])
                return cast(Json, answer["result"])
            self.events.append(answer)

    def _receive(self, end_at: float, method: str) -> Json:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers_fd], [], [], end_at - time.monotonic())
            assert ready, f"Chromium did not answer {method}"
            read = os.read(self._answers_fd, 1 << 20)
            assert read, "Chromium has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        return cast(Json, json.loads(line))


class Tab:
    """One page of a browser, in a context of its own: no storage is shared with another."""

    def __init__(self, browser: Browser, size: tuple[int, int], scheme: str) -> None:
        self._browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        self._context = context
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if it lay in front
        self.look(size, scheme)

    def _call(self, method: str, **params: object) -> Json:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def look(self, size: tuple[int, int], scheme: str) -> None:
        """size: width and height of the screen. scheme: light or dark."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # it costs, without a GPU
        ]
        self._call("Emulation.setEmulatedMedia", features=features)
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip

    def open(self, url: str) -> None:
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)
        self.wait("the page", lambda tab: tab.evaluate("document.readyState") == "complete")

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression; promises are waited for."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return cast(Json, answer["result"]).get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of the first element found; "" where nothing is shown."""
        return str(
            self.evaluate(
                f"(found => found?.checkVisibility() ? found.innerText : '')"
                f"(document.querySelector({json.dumps(selector)}))"
            )
        )

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")

    def press(self, key: str, *, control: bool = False) -> None:
        """A key with the focus where it is."""
        number = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" and not control else {}  # what submits a form
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=number,
                modifiers=2 if control else 0, **text,
            )  # fmt: skip
            text = {}

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def wait(self, what: str, found: Callable[[Tab], bool], timeout_s: float = 60.0) -> None:
        """Poll until `found`. Fails the test, naming `what` and the page, if it never is."""
        end_at = time.monotonic() + timeout_s
        while not found(self):
            assert time.monotonic() < end_at, f"waited for {what}:\n{self.text('body')}"
            time.sleep(POLL_INTERVAL_S)

    def complaints(self) -> list[str]:
        """What the console has shown so far of errors and warnings, and exceptions."""
        self.evaluate("0")  # whatever came before it has been read then
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = cast(dict[str, Json], event["params"])
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    found.append(str(params))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(str(params["entry"]))
        return found

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG, for people."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(str(answer["data"])))


@contextmanager
def open_tab(
    browser: Browser, url: str, size: tuple[int, int] = DESK, scheme: str = "light"
) -> Iterator[Tab]:
    tab = Tab(browser, size, scheme)
    try:
        tab.open(url)
        yield tab
    finally:
        tab.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile, gone without a trace after."""
    assert CHROMIUM is not None, WHY_NOT
    # Far from 3 and 4, which the child gets its ends as.
    commands_read, commands_write = _far_pipe()
    answers_read, answers_write = _far_pipe()

    def place_pipes() -> None:
        os.dup2(commands_read, COMMANDS_FD)
        os.dup2(answers_write, ANSWERS_FD)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place_pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands_read)
        os.close(answers_write)
        try:
            yield Browser(commands_write, answers_read)
        finally:
            process.kill()
            process.wait()
            os.close(commands_write)
            os.close(answers_read)


def _far_pipe() -> tuple[int, int]:
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in ends)
    for end in ends:
        os.close(end)
    return read, write
