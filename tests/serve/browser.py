"""A page in headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


class Browser:
    """A page that is open in Chromium, as a context.

    Args:
        url: Of the page.
        size: Width and height of the window.
    """

    def __init__(self, url: str, size: tuple[int, int] = (1280, 900)) -> None:
        self.url, self.size, self.count = url, size, 0

    def __enter__(self) -> Browser:
        self.folder = tempfile.mkdtemp()
        assert CHROMIUM is not None
        command = [CHROMIUM, *QUIET, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self._until(lambda: (Path(self.folder) / "DevToolsActivePort").read_text().splitlines()[0])
        pages = self._until(lambda: self._pages(int(port)))
        self.stack = ExitStack()
        opened = connect(pages[0]["webSocketDebuggerUrl"], max_size=2**26, open_timeout=60)
        self.socket = self.stack.enter_context(opened)
        self.send("Page.enable")
        self.send("Runtime.enable")
        width, height = self.size
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=self.url)
        self._until(lambda: self.run("document.readyState === 'complete' && location.href !== 'about:blank'") or None)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """Return what a script gives."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def drop(self, content: bytes, kind: str = "image/png") -> str:
        """Drop a file on the page, and return the text of the verdict that appears."""
        self.run("document.getElementById('result').replaceChildren()")
        data = base64.b64encode(content).decode()
        self.run(
            f"""(() => {{
              const bytes = Uint8Array.from(atob("{data}"), (c) => c.charCodeAt(0));
              const transfer = new DataTransfer();
              transfer.items.add(new File([bytes], "image", {{type: "{kind}"}}));
              document.dispatchEvent(new DragEvent("drop", {{dataTransfer: transfer, bubbles: true}}));
            }})()"""
        )
        return self._until(lambda: self.run("document.getElementById('result').innerText") or None)

    def picture(self, path: Path) -> None:
        """Save what the page looks like."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.size[0]
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    @staticmethod
    def _pages(port: int) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            return [page for page in json.load(answer) if page["type"] == "page"]

    @staticmethod
    def _until(look: Any, seconds: float = 120.0) -> Any:
        """Look until there is something."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                found = look()
            except (OSError, IndexError, AssertionError):
                found = None
            if found:
                return found
            time.sleep(0.1)
        raise TimeoutError("the browser shows nothing")
