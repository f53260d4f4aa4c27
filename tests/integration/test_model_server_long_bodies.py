"""The model server while a long body is read, and who may load adapters."""

import asyncio
import json
import threading
from typing import Any

from model_server.core.request import TokenId
from tests.harness.http_model_server import Start, until

_LOAD = {"lora_name": "new", "lora_path": "/v1"}


async def test_health_is_answered_while_a_long_body_is_cut_into_tokens(start: Start) -> None:
    server = await start()
    reading, go_on = threading.Event(), threading.Event()
    encode = server.server.backend.language.encode

    def slowly(text: str) -> list[TokenId]:
        reading.set()
        assert go_on.wait(60)
        return encode(text)

    server.server.backend.language.encode = slowly  # type: ignore[method-assign]
    body = json.dumps({"prompt": "word " * 40_000, "max_tokens": 1}).encode()
    long = asyncio.create_task(server.post("/v1/completions", body))
    await until(reading.is_set)
    try:
        async with asyncio.timeout(30), server.http.get("/health") as response:
            assert response.status == 200
        assert not long.done()
    finally:
        go_on.set()
    assert (await long)[0] == 200


async def test_adapters_cannot_be_loaded_over_http_unless_that_is_asked_for(start: Start) -> None:
    server = await start(allow_runtime_lora_updating=False)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await server.post(path, _LOAD))[0] == 404
    assert {adapter.name for adapter in server.server.models.adapters} == {"style", "law"}


async def test_adapters_are_bounded_in_number_name_and_path(start: Start) -> None:
    server = await start(max_adapters=3)

    async def load(**changes: str) -> tuple[int, Any]:
        return await server.post("/v1/load_lora_adapter", {**_LOAD, **changes})

    for changes, param in (
        ({"lora_name": "x" * 129}, "lora_name"),
        ({"lora_path": "/" * 1025}, "lora_path"),
        ({"lora_path": "/" * 100_000}, "lora_path"),
    ):
        status, answer = await load(**changes)
        assert (status, answer["error"]["param"]) == (400, param)
        assert len(answer["error"]["message"]) < 500
    assert (await load())[0] == 200
    status, answer = await load(lora_name="one more")
    assert status == 400
    assert "--max-adapters" in answer["error"]["message"]
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "new"}))[0] == 200
    assert (await load(lora_name="one more"))[0] == 200
