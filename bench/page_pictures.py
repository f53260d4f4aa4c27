"""Takes the pictures of docs/live-page.md in a real Chromium, of a made-up pool:
`python -m bench.page_pictures`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.harness.browser import browser
from tests.harness.live_page import live_page

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_VIEWS = (("four", 4, 1280, 2060, False),)


async def main() -> None:
    for name, count, width, height, dark in _VIEWS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            async with live_page(count) as scene, browser(Path(directory)) as page:
                await page.open(scene.url, width=width, height=height, dark=dark)
                await page.until("document.querySelectorAll('#requests summary').length")
                await page.value("document.querySelectorAll('#requests summary')[1].click()")
                await page.until("document.querySelector('#requests details[open] .cand')")
                await page.screenshot(_DOCS / f"live-page-{name}.png", scale=0.6)


if __name__ == "__main__":
    asyncio.run(main())
