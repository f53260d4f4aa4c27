"""A real headless Chromium, driven over its DevTools protocol, to see what a person would see.

`chromium()` installs Debian's package if it is missing and apt-get may be used. Elsewhere it says what to
install.
"""

import asyncio
import base64
import fcntl
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_WITHIN_S: Final = 60.0


def chromium() -> str:
    """Return the path of the program. RuntimeError: there is none, and none can be installed."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    if os.geteuid() or not shutil.which("apt-get"):
        raise RuntimeError("these tests need a Chromium: apt-get install chromium")
    with Path("/tmp/prefix-gateway-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shutil.which("chromium"):
            subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
            command = [
                "apt-get",
                "install",
                "-y",
                "-q",
                "--no-install-recommends",
                "chromium",
                "fonts-dejavu-core",
            ]
            subprocess.run(command, check=True, capture_output=True)
    return chromium()


class Browser:
    """One page of a running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """Errors on the console, and everything that the content policy refused."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=_WITHIN_S)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(_WITHIN_S):
            while not await self.value(f"Boolean({script})"):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def seen(self, selector: str) -> str:
        """Return the text that is shown there."""
        found: str = await self.value(f"document.querySelector({selector!r}).innerText")
        return found

    async def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}[name]
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text
            )

    async def screenshot(self, path: Path, *, scale: float = 1.0) -> None:
        """Write the visible part to `path`, in the format that its name says: png, jpeg or webp."""
        size = await self.value("[innerWidth, innerHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": scale}
        found = await self.call("Page.captureScreenshot", format=path.suffix[1:], quality=20, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Browser]:
    """Run a browser until the block ends. `directory` holds its profile."""
    profile = directory / "profile"
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        chromium(), *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(_WITHIN_S):
            while not (port_file.exists() and port_file.read_text().strip()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=2**26) as socket:
                yield Browser(socket)
    finally:
        process.kill()
        await process.wait()
