"""The model server over HTTP: the shapes of answers, whole and streamed, how they end, and aborts."""

import asyncio

import pytest

from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from tests.harness.http_model_server import NEVER_ENDING, PROMPT, Start, until


@pytest.mark.core
async def test_a_completion_has_the_apis_shape(start: Start) -> None:
    server = await start()
    answer = await server.complete(model="demo", max_tokens=5)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert len(choice["text"]) > 5
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


@pytest.mark.core
async def test_a_next_turn_finds_prompt_and_answer_of_the_last_one_in_the_cache(start: Start) -> None:
    server = await start()
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    status, first = await server.post(
        "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 50}
    )
    assert status == 200
    [choice] = first["choices"]
    assert first["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    messages += [choice["message"], {"role": "user", "content": "Go on, please, and tell me more."}]
    _, second = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    computed = first["usage"]["total_tokens"] - 1  # the last token was never fed back
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_an_answer_ends_by_itself_without_ignore_eos(start: Start) -> None:
    server = await start(mean_answer_tokens=10)
    ended = await server.complete(max_tokens=100)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert 5 <= ended["usage"]["completion_tokens"] <= 16
    ignoring = await server.complete(max_tokens=100, ignore_eos=True)
    assert ignoring["choices"][0]["finish_reason"] == "length"
    assert ignoring["usage"]["completion_tokens"] == 100
    longer = await server.complete(max_tokens=100, min_tokens=40)
    assert longer["usage"]["completion_tokens"] == 41, "the end marker comes as soon as it may"
    assert longer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.core
async def test_a_stream_has_the_text_of_the_whole_answer_in_order(start: Start) -> None:
    server = await start()
    whole = await server.complete(max_tokens=30)
    body = {"prompt": PROMPT, "max_tokens": 30, "stream_options": {"include_usage": True}}
    *chunks, last, done = await server.events("/v1/completions", body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30
    cached_tokens = (last["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": cached_tokens}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 29 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_several_prompts_stream_side_by_side(start: Start) -> None:
    server = await start()
    whole = await server.complete(prompt=["one", "two"], max_tokens=6)
    chunks = (await server.events("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 6}))[:-1]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]


async def test_several_answers_to_each_prompt_count_its_tokens_once(start: Start) -> None:
    server = await start()
    answer = await server.complete(prompt=["one", "two"], n=2, max_tokens=6)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 4
    alone = await server.complete(prompt=["one", "two"], max_tokens=6)
    assert [choices[0]["text"], choices[2]["text"]] == [choice["text"] for choice in alone["choices"]]
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 24
    chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 2}
    *chunks, _ = await server.events("/v1/chat/completions", chat)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2}
    begun = [choice for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert [choice["index"] for choice in begun] == [0, 1, 2], "each answer begins with its role"
    assert begun == [choice for chunk in chunks[:3] for choice in chunk["choices"]]


async def test_usage_in_each_event_grows_with_the_answer(start: Start) -> None:
    server = await start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["one", PROMPT], "max_tokens": 3, "stream_options": options}
    *chunks, last, _ = await server.events("/v1/completions", body)
    for index in (0, 1):
        mine = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in mine] == [1, 2, 3]
        assert len({usage["prompt_tokens"] for usage in mine}) == 1
    assert last["usage"]["completion_tokens"] == 6


async def test_a_stream_interval_joins_tokens_after_the_first(start: Start) -> None:
    server = await start(stream_interval=10)
    whole = await server.complete(max_tokens=25)
    chunks = (await server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 25}))[:-1]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 4  # tokens 1, 2-11, 12-21, 22-25
    assert "".join(texts) == whole["choices"][0]["text"]


async def test_stream_headers_come_before_any_prefill_and_an_abort_frees_blocks(start: Start) -> None:
    server = await start(costs=NEVER_ENDING)
    async with server.http.post("/v1/completions", json={"prompt": PROMPT, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        await until(lambda: server.engine.kv_cache.pool.usage > 0)
        assert await server.value("vllm:num_requests_running") == 1
        assert await server.value("vllm:kv_cache_usage_perc") > 0
        assert await server.value("vllm:prompt_tokens_total") == 0
        response.close()
    await until(lambda: server.engine.kv_cache.pool.usage == 0)
    assert server.engine.num_unfinished == 0
    assert (await server.ended())["abort"] == 1


@pytest.mark.core
async def test_an_abort_in_the_middle_of_a_stream_frees_the_blocks(start: Start) -> None:
    server = await start(costs=CostModel())
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    async with server.http.post("/v1/completions", json=body) as response:
        await response.content.readline()
        assert server.engine.kv_cache.pool.usage > 0
        response.close()
    await until(lambda: server.engine.kv_cache.pool.usage == 0)
    assert server.engine.num_unfinished == 0


async def test_an_abandoned_whole_answer_frees_the_blocks_running_or_waiting(start: Start) -> None:
    server = await start(costs=NEVER_ENDING, limits=SchedulerLimits(max_num_seqs=1))
    posts = [
        asyncio.create_task(server.post("/v1/completions", {"prompt": [PROMPT, "second"]})),
        asyncio.create_task(
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        ),
    ]
    await until(lambda: server.engine.num_unfinished == 3)
    assert await server.value("vllm:num_requests_waiting") == 2
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    await until(lambda: server.engine.num_unfinished == 0)
    assert server.engine.kv_cache.pool.usage == 0
    server.engine.check_integrity()


async def test_a_stop_string_ends_the_answer_before_it_streamed_or_not(start: Start) -> None:
    server = await start()
    whole = (await server.complete(max_tokens=60))["choices"][0]["text"]
    stop = whole[40:47]
    assert whole.index(stop) == 40
    stopped = await server.complete(max_tokens=60, stop=[stop, "never said"])
    [choice] = stopped["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:40], "stop", stop)
    assert stopped["usage"]["completion_tokens"] < 30
    shown = await server.complete(max_tokens=60, stop=stop, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == whole[:47]
    chunks = (await server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "stop": stop}))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:40]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [chunk["choices"][0]["stop_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [stop]
    assert server.engine.num_unfinished == 0
    assert server.engine.kv_cache.pool.usage == 0
    assert await server.ended() == {"stop": 3, "length": 1, "abort": 0}
