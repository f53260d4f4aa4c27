"""Takes the picture of docs/live-page.md in a real Chromium, of a made-up pool:
`python -m bench.page_pictures`.
"""

import asyncio
import tempfile
from pathlib import Path

from tests.harness.browser import browser
from tests.harness.live_page import live_page

_DOCS = Path(__file__).resolve().parents[1] / "docs"


async def main() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        async with live_page(4) as scene, browser(Path(directory)) as page:
            await page.open(scene.url, width=1280, height=1925)
            await page.until("document.querySelectorAll('#requests summary').length")
            await page.value("document.querySelectorAll('#requests summary')[1].click()")
            await page.until("document.querySelector('#requests details[open] .cand')")
            await page.screenshot(_DOCS / "live-page.webp", scale=0.5)


if __name__ == "__main__":
    asyncio.run(main())
