"""The live page of several pickers. The other pickers have many servers, or run another version, or are not
pickers at all.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epp.observe.telemetry.board import COLUMNS, part_of
from tests.harness.listening import serving
from tests.harness.live_page import Scene, live_page
from tests.harness.processes import wait_until


def shown(page: bytes) -> Any:
    return json.loads(gzip.decompress(page))


def address_of(scene: Scene) -> str:
    return scene.url.removeprefix("http://").rstrip("/")


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[str]:
    """Answer every request with `body`."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/live", answer)
    async with serving(app) as port:
        yield f"127.0.0.1:{port}"


async def test_the_part_of_a_picker_of_many_servers_is_added() -> None:
    async with live_page(1500) as other:
        assert len(json.dumps(other.board.own())) > 2**17
        assert len(json.dumps(other.board.part())) < 2**15
        async with live_page(1500, siblings=(address_of(other),)) as scene:

            async def both() -> bool:
                """The other picker has a second to answer, and may need longer on a busy machine. It is asked
                again ten seconds later.
                """
                return bool(shown(await scene.board.packed())["pickers"] == 2)

            await wait_until(both, what="both parts are shown", timeout_s=60)


def part_with(more: bytes) -> bytes:
    """Return the part of a picker without requests, with a field that no picker sends."""
    part = {"picker": "other", "columns": COLUMNS, "overload": 0.0, "requests": [], "queue": []}
    said = json.dumps({**part, "explain": {}, "dry_run": None})
    return said[:-1].encode() + b', "more": ' + more + b"}"


@pytest.mark.parametrize("costly", [b"1e-310,", b"[],", b'{"a":0},', b'"",'])
def test_a_part_that_takes_long_to_read_is_not_read(costly: bytes) -> None:
    """To read four million bytes of these took 5.1, 1.0, 0.3 and 0.5 s of the event loop."""
    assert part_of(part_with(b"[" + costly * 10 + b"0]")) is not None
    assert part_of(part_with(b"[" + costly * (2**17 // len(costly)) + b"0]")) is None


async def test_the_parts_of_all_others_together_have_a_limit() -> None:
    async with AsyncExitStack() as stack:
        large = part_with(b'"' + b"x" * (2**18 - 300) + b'"')
        bodies = [large.replace(b'"other"', b'"other%d"' % n) for n in range(20)]
        siblings = [await stack.enter_async_context(answering(body)) for body in bodies]
        scene = await stack.enter_async_context(live_page(4, siblings=tuple(siblings)))
        assert 2 <= shown(await scene.board.packed())["pickers"] <= 1 + 16


async def test_a_page_over_the_limit_is_left_out() -> None:
    async with (
        answering(part_with(b"[" + b'"",' * 10 + b'"' + b"x" * 2**18 + b'"]')) as address,
        live_page(4, siblings=(address,)) as scene,
    ):
        assert shown(await scene.board.packed())["pickers"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": [{}]}, {"requests": 5}, {"requests": [{"at": "x"}]}, {"overload": "x"}, {"queue": 3}, {"explain": []},
        {"explain": {"causes": [{}]}}, {"explain": {"prompt_tokens": "x"}}, {"dry_run": 5},
        {"columns": []}, {"picker": None},
    ],
)  # fmt: skip
async def test_a_part_of_an_unknown_form_is_left_out_and_the_page_is_shown(
    wrong: dict[str, Any],
) -> None:
    async with live_page(4) as other:
        part = json.loads(json.dumps(other.board.own()))
    assert part_of(json.dumps(part).encode()) == part
    async with (
        answering(json.dumps({**part, **wrong}).encode()) as address,
        live_page(4, siblings=(address,)) as scene,
    ):
        assert shown(await scene.board.packed())["pickers"] == 1


async def test_values_of_a_dry_run_that_are_not_numbers_are_not_added() -> None:
    async with live_page(4) as other:
        part = json.loads(json.dumps(other.board.own()))
    part["dry_run"]["picks"] = "many"
    async with answering(json.dumps(part).encode()) as address, live_page(4, siblings=(address,)) as scene:
        assert shown(await scene.board.packed())["dry_run"]["picks"] == 5120
