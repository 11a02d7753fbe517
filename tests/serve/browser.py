"""A headless Chromium driven over a pipe: Chrome's own protocol, no package needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. ``errors`` collects what its console complains about."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=1300,900"]
        # The protocol is fixed to the file descriptors 3 and 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.errors: list[str] = []
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self.call("Page.navigate", url=url)
        end = time.monotonic() + 30
        while not self.run(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'"):
            assert time.monotonic() < end, f"{url} does not load"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait in the page until a JavaScript condition holds; half a minute at most."""
        js = f"""new Promise((resolve, reject) => {{
            const end = Date.now() + 30000, look = () => {{
                if ({condition}) resolve(true);
                else if (Date.now() > end) reject(new Error("waited in vain"));
                else setTimeout(look, 30);
            }};
            look();
        }})"""
        assert self.run(js), condition

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 65536)
            assert data, "the browser is gone"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(event["params"]["entry"]["text"]))
