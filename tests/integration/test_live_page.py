"""The live page in a real headless Chromium."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.harness.browser import Browser, browser
from tests.harness.live_page import decision_for, live_page

HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture
async def chrome(tmp_path: Path) -> AsyncIterator[Browser]:
    async with browser(tmp_path) as running:
        yield running


async def rows(chrome: Browser) -> list[str]:
    found: list[str] = await chrome.value(
        "[...document.querySelectorAll('#t-endpoints tbody tr')].map(row => row.innerText)"
    )
    return found


LOADED = "document.querySelectorAll('#t-endpoints tbody tr').length"


async def test_a_person_sees_endpoints_misses_queue_dry_run_and_requests(chrome: Browser) -> None:
    async with live_page(4) as scene:
        await chrome.open(scene.url)
        await chrome.until(LOADED)
        shown = await rows(chrome)
        assert len(shown) == 4
        (out,) = (row for row in shown if "ejected" in row)
        assert out.startswith("vllm-2")
        assert "half of its recent answers failed" in out
        assert "55 %" in next(row for row in shown if row.startswith("vllm-0"))
        assert await chrome.value("document.querySelectorAll('#t-endpoints svg.spark').length") == 4
        tiles = await chrome.seen("#tiles")
        assert "3 / 4" in tiles
        assert "67 %" in tiles
        assert "policy default, rule least-cost" in await chrome.seen("#summary")
        explained = await chrome.seen("#explain")
        assert explained.index("never seen before") < explained.index("evicted before the prefix came again")
        assert "vllm-1 (98 % full)" in explained
        assert "priority 0: 7, priority 10: 2" in await chrome.seen("#queue")
        assert "batch, priority 0: 7 requests, 9,000 tokens" in await chrome.seen("#queue")
        dry = await chrome.seen("#dry")
        assert "agrees with 4,660 of 5,120 picks, 91 %" in dry
        assert "→ vllm-3, 900 more cached tokens, 113 ms sooner" in dry
        assert "found 72 % of the prompt tokens cached in place of 67 %" in dry
        assert "first token would have come 60 ms sooner on average; it would have refused 20 requests" in dry
        requests = await chrome.seen("#requests")
        assert "refused 429" in requests
        assert "2,048 of 3,400 cached" in requests
        assert chrome.complaints == []
        await chrome.open(f"{scene.url}decisions/refused-1")
        await chrome.until("document.querySelector('#facts dd')")
        assert "the first token would come too late" in await chrome.seen("#facts")


async def test_of_a_thousand_endpoints_the_worst_hundred_are_shown_and_all_found(chrome: Browser) -> None:
    async with live_page(1000) as scene:
        await chrome.open(scene.url, dark=True)
        await chrome.until(LOADED)
        assert len(await rows(chrome)) == 100
        assert "the first 100 of 1000" in await chrome.seen("#shown")
        dark = await chrome.value("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(17, 21, 27)"
        await chrome.value(
            "(f => { f.value = 'vllm-99'; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))"
        )
        assert sorted(row.split()[0] for row in await rows(chrome))[:2] == ["vllm-99", "vllm-990"]
        assert len(await rows(chrome)) == 11


async def test_names_from_clients_are_shown_as_text(chrome: Browser) -> None:
    async with live_page(1) as scene:
        scene.ring.append(decision_for(50, name=HOSTILE))
        await chrome.open(scene.url)
        await chrome.until("document.querySelectorAll('#requests summary').length")
        assert HOSTILE in await chrome.seen("#requests")
        assert await chrome.value("document.querySelectorAll('img').length") == 0
        assert await chrome.value("window.hacked") is None
        assert chrome.complaints == []


async def test_the_page_says_that_the_picker_is_gone(chrome: Browser) -> None:
    async with live_page(4) as scene:
        await chrome.open(scene.url)
        await chrome.until(LOADED)
    await chrome.until("!document.getElementById('stale').hidden")
    assert "does not answer" in await chrome.seen("#stale")
