"""The model server over HTTP: shapes, streaming, cache isolation, aborts, errors, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from model_server.core.cache_observer import Unobserved
from model_server.core.engine import Engine, StepResult
from model_server.core.request import Adapter
from model_server.core.scheduler import SchedulerLimits, StepPlan
from model_server.runners.cost import CostModel
from model_server.server.backends import CostSettings
from model_server.server.serve import Server, ServerSettings, listening

FAST = CostModel(speed=1000)
NEVER_ENDING = CostModel(prefill_tokens_per_s=0.001)  # one step outlasts any test
PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 6


@dataclass(frozen=True, slots=True)
class Running:
    """A listening server and a client for it."""

    http: aiohttp.ClientSession
    server: Server

    @property
    def engine(self) -> Engine:
        return self.server.engine

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data) as response:
            text = await response.text()
            kind = response.content_type
            return response.status, json.loads(text) if kind == "application/json" else text

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **body})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def cached(self, **body: Any) -> int:
        usage = (await self.complete(**body))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]

    async def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        async with self.http.get("/metrics") as response:
            page = await response.text()
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    async def value(self, name: str) -> float:
        [(_, value)] = (await self.metrics())[name]
        return value


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(**changes: Any) -> Running:
            limits = changes.pop("limits", SchedulerLimits())
            backend = CostSettings(
                costs=changes.pop("costs", FAST), mean_answer_tokens=changes.pop("mean_answer_tokens", 128)
            )
            settings = ServerSettings(
                **{
                    "port": 0,
                    "model": "demo",
                    "limits": limits,
                    "backend": backend,
                    "adapters": (Adapter("style", "/s"), Adapter("law")),
                    "drain_timeout_s": 0.01,
                    **changes,
                }
            )
            server = Server(settings)
            port = await stack.enter_async_context(listening(server, settings))
            http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            return Running(http, server)

        yield started


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine has no event for it, by design
            await asyncio.sleep(0.002)


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


async def test_the_same_prompt_gets_the_same_answer_cached_or_not(start: Start) -> None:
    server = await start()
    first, second = await server.complete(max_tokens=40), await server.complete(max_tokens=40)
    assert first["choices"] == second["choices"]
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": (prompt_tokens - 1) // 16 * 16}


async def test_a_prompt_of_every_form_is_answered(start: Start) -> None:
    server = await start()
    for prompt, choices in (("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3], [4]], 3)):
        answer = await server.complete(prompt=prompt)
        assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
        assert answer["usage"]["completion_tokens"] == 4 * choices


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


async def test_an_answer_ends_by_itself_unless_told_otherwise(start: Start) -> None:
    server = await start(mean_answer_tokens=10)
    ended = await server.complete(max_tokens=100)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert 5 <= ended["usage"]["completion_tokens"] <= 16
    ignoring = await server.complete(max_tokens=100, ignore_eos=True)
    assert ignoring["choices"][0]["finish_reason"] == "length"
    assert ignoring["usage"]["completion_tokens"] == 100


async def test_a_stream_says_what_the_whole_answer_says_in_order(start: Start) -> None:
    server = await start()
    whole = await server.complete(max_tokens=30)
    body = {"prompt": PROMPT, "max_tokens": 30, "stream_options": {"include_usage": True}}
    *chunks, last, done = await server.events("/v1/completions", body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 29 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_chat_stream_begins_with_the_role(start: Start) -> None:
    server = await start()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    *chunks, done = await server.events("/v1/chat/completions", body)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len([delta for delta in deltas[1:] if delta["content"]]) == 3


async def test_several_prompts_stream_side_by_side(start: Start) -> None:
    server = await start()
    whole = await server.complete(prompt=["one", "two"], max_tokens=6)
    chunks = (await server.events("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 6}))[:-1]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]


async def test_a_stream_interval_joins_tokens_after_the_first(start: Start) -> None:
    server = await start(stream_interval=10)
    whole = await server.complete(max_tokens=25)
    chunks = (await server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 25}))[:-1]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 4  # tokens 1, 2-11, 12-21, 22-25
    assert "".join(texts) == whole["choices"][0]["text"]


async def test_stream_headers_come_before_any_prefill_and_an_abort_frees_the_blocks(start: Start) -> None:
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
    aborted = [
        v
        for labels, v in (await server.metrics())["vllm:request_success_total"]
        if labels["finished_reason"] == "abort"
    ]
    assert aborted == [1]


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


async def test_tenants_with_different_salts_share_nothing(start: Start) -> None:
    server = await start()
    assert await server.cached(cache_salt="a") == 0
    assert await server.cached(cache_salt="b") == 0
    assert await server.cached() == 0
    assert await server.cached(cache_salt="a") > 0
    assert await server.cached(cache_salt="b") > 0


async def test_adapters_share_nothing_with_each_other_or_the_base(start: Start) -> None:
    server = await start()
    for name in ("demo", "style", "law"):
        assert await server.cached(model=name) == 0
    for name in ("demo", "style", "law"):
        assert await server.cached(model=name) > 0


async def test_an_adapter_comes_and_goes_at_run_time(start: Start) -> None:
    server = await start()
    assert (await server.post("/v1/completions", {"model": "new", "prompt": "x"}))[0] == 404
    load = {"lora_name": "new", "lora_path": "/v1"}
    assert (await server.post("/v1/load_lora_adapter", load))[0] == 200
    assert (await server.post("/v1/load_lora_adapter", load))[0] == 400
    assert await server.cached(model="new") == 0
    assert await server.cached(model="new") > 0
    async with server.http.get("/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    assert cards.keys() == {"demo", "style", "law", "new"}
    assert (cards["new"]["parent"], cards["new"]["root"]) == ("demo", "/v1")
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "new"}))[0] == 200
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "new"}))[0] == 404
    await server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/v2"})
    assert await server.cached(model="new") == 0  # other weights, other cache


async def test_reset_empties_the_prefix_cache(start: Start) -> None:
    server = await start()
    await server.cached()
    assert await server.cached() > 0
    assert (await server.post("/reset_prefix_cache", b""))[0] == 200
    assert await server.cached() == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", b"{", None),
        ("completions", b"\xff\xfe", None),
        ("completions", b"[" * 100_000, None),
        ("completions", b'{"prompt": "\\ud800"}', None),
        ("completions", {}, None),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [1, -2]}, "prompt"),
        ("completions", {"prompt": [1, "x"]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": "x", "n": 2}, "n"),
        ("completions", {"prompt": "x", "echo": True}, "echo"),
        ("completions", {"prompt": "x", "logprobs": 0}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "stop": ["a", ""]}, "stop"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ("completions", {"prompt": "x", "stop": "a" * 257}, "stop"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, None),
        ("completions", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options"),
        ("completions", {"prompt": "word " * 5000}, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 5000}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "top_logprobs",
        ),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "a|>", "content": "x"}]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        ("chat/completions", {"messages": "hi"}, None),
    ],
)
async def test_bad_input_gets_400_in_the_apis_shape(
    start: Start, path: str, body: Any, param: str | None
) -> None:
    server = await start(max_model_len_tokens=4096)
    status, answer = await server.post(f"/v1/{path}", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]
    assert server.engine.num_unfinished == 0


async def test_an_unknown_model_and_an_unknown_path_get_404(start: Start) -> None:
    server = await start()
    status, answer = await server.post("/v1/completions", {"prompt": "x", "model": "nope"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await server.post("/v1/nope", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    async with server.http.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"


async def test_while_draining_the_server_is_unhealthy_and_refuses_work(start: Start) -> None:
    server = await start()
    server.server.driver.draining = True
    async with server.http.get("/health") as response:
        assert response.status == 503
    status, answer = await server.post("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["type"]) == (503, "service_unavailable")


async def test_a_full_queue_answers_429(start: Start) -> None:
    server = await start(costs=NEVER_ENDING, limits=SchedulerLimits(max_num_seqs=1), max_waiting=1)
    posts = []
    for number in (1, 2):
        posts.append(asyncio.create_task(server.post("/v1/completions", {"prompt": "x"})))
        await until(lambda number=number: server.engine.num_unfinished == number)  # type: ignore[misc]  # a lambda with a default
        await until(lambda: len(server.engine.scheduler.running) == 1)
    async with server.http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status == 429
        assert response.headers["retry-after"] == "1"
        assert (await response.json())["error"]["type"] == "rate_limit_exceeded"
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)


async def test_metrics_carry_vllms_names_labels_and_the_right_counts(start: Start) -> None:
    server = await start(num_blocks=512)
    first, second = await server.complete(), await server.complete()
    metrics = await server.metrics()
    labels = {"engine": "0", "model_name": "demo"}
    prompt = first["usage"]["prompt_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    for name, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prefix_cache_queries_total": 2 * prompt,
        "prefix_cache_hits_total": cached,
        "prompt_tokens_total": 2 * prompt,
        "prompt_tokens_cached_total": cached,
        "generation_tokens_total": 8,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 6,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_prompt_tokens_count": 2,
        "request_prompt_tokens_sum": 2 * prompt,
    }.items():
        assert metrics[f"vllm:{name}"] == [(labels, value)], name
    ended = {labels["finished_reason"]: value for labels, value in metrics["vllm:request_success_total"]}
    assert ended == {"stop": 0, "length": 2, "abort": 0}
    [(info, one)] = metrics["vllm:cache_config_info"]
    assert one == 1
    assert info["block_size"] == "16"
    assert info["num_gpu_blocks"] == "512"
    assert info["kv_cache_size_tokens"] == str(512 * 16)
    assert info["enable_prefix_caching"] == "True"


async def test_lora_info_appears_with_the_first_adapters_request_and_its_newest_sample_is_true(
    start: Start,
) -> None:
    server = await start(costs=NEVER_ENDING, limits=SchedulerLimits(max_loras=1))
    await server.post("/v1/load_lora_adapter", {"lora_name": "idle", "lora_path": "/i"})
    assert "vllm:lora_requests_info" not in await server.metrics()

    async def newest() -> dict[str, str]:
        samples = (await server.metrics())["vllm:lora_requests_info"]
        return max(samples, key=lambda sample: sample[1])[0]

    posts = [asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "model": "style"}))]
    await until(lambda: len(server.engine.scheduler.running) == 1)
    expected = {"max_lora": "1", "running_lora_adapters": "style", "waiting_lora_adapters": ""}
    assert await newest() == expected
    posts.append(asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "model": "law"})))
    await until(lambda: server.engine.num_unfinished == 2)
    assert await newest() == {**expected, "waiting_lora_adapters": "law"}
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    await until(lambda: server.engine.num_unfinished == 0)
    assert await newest() == {**expected, "running_lora_adapters": ""}


async def test_without_prefix_caching_nothing_is_cached(start: Start) -> None:
    server = await start(enable_prefix_caching=False)
    await server.complete()
    assert await server.cached() == 0


async def test_tokenize_counts_what_a_request_will_count(start: Start) -> None:
    server = await start()
    _, tokens = await server.post("/tokenize", {"prompt": PROMPT})
    assert tokens["count"] == len(tokens["tokens"]) == (await server.complete())["usage"]["prompt_tokens"]
    messages = [{"role": "user", "content": "Hi"}]
    _, chat = await server.post("/tokenize", {"messages": messages})
    _, answer = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    assert (await server.post("/tokenize", {}))[0] == 400


async def test_detokenize_gives_an_answers_text_back_and_refuses_what_is_no_answers(start: Start) -> None:
    server = await start()
    text = (await server.complete(max_tokens=20))["choices"][0]["text"]
    _, tokens = await server.post("/tokenize", {"prompt": text})
    assert await server.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": text})
    status, answer = await server.post("/detokenize", {"tokens": [1]})
    assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_a_stop_string_ends_the_answer_before_it_streamed_or_not(start: Start) -> None:
    server = await start()
    whole = (await server.complete(max_tokens=60))["choices"][0]["text"]
    stop = whole[40:47]
    assert whole.index(stop) == 40
    stopped = await server.complete(max_tokens=60, stop=[stop, "never said"])
    [choice] = stopped["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[:40], "stop")
    assert stopped["usage"]["completion_tokens"] < 30
    shown = await server.complete(max_tokens=60, stop=stop, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == whole[:47]
    chunks = (await server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "stop": stop}))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:40]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert server.engine.num_unfinished == 0
    assert server.engine.kv_cache.pool.usage == 0
    ended = {
        labels["finished_reason"]: v for labels, v in (await server.metrics())["vllm:request_success_total"]
    }
    assert ended == {"stop": 3, "length": 1, "abort": 0}


async def test_an_answer_that_ends_inside_what_could_have_become_a_stop_string_is_whole(start: Start) -> None:
    server = await start()
    whole = (await server.complete(max_tokens=20))["choices"][0]["text"]
    stop = whole[-3:] + " and then something else"
    assert (await server.complete(max_tokens=20, stop=stop))["choices"][0]["text"] == whole
    chunks = (await server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "stop": stop}))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


async def test_a_stop_string_in_one_choice_leaves_the_other_alone(start: Start) -> None:
    server = await start()
    one, two = (await server.complete(prompt=["one", "two"], max_tokens=40))["choices"]
    stop = one["text"][20:30]
    assert stop not in two["text"]
    answer = await server.complete(prompt=["one", "two"], max_tokens=40, stop=stop)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [one["text"][:20], two["text"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]


async def test_a_body_over_the_limit_gets_413_in_the_apis_shape(start: Start) -> None:
    server = await start(max_body_bytes=2000)
    assert (await server.post("/v1/completions", {"prompt": "x" * 1900}))[0] == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        status, answer = await server.post(path, {"prompt": "x" * 2000})
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


async def test_an_unexpected_fault_is_500_in_the_apis_shape_and_a_traceback_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start()
    server.engine.kv_cache.observer = Broken()
    status, answer = await server.post("/reset_prefix_cache", b"")
    assert status == 500
    assert answer["error"]["type"] == "internal_server_error"
    assert "broken on purpose" not in json.dumps(answer)
    assert "broken on purpose" in caplog.text


class Broken(Unobserved):
    def cleared(self) -> None:
        raise RuntimeError("broken on purpose")


async def test_small_pages(start: Start) -> None:
    server = await start(served_names=("one", "two"))
    for path in ("/health", "/ping", "/version", "/kv_event_sources"):
        async with server.http.get(path) as response:
            assert response.status == 200
    assert (await server.complete(model="two"))["model"] == "two"
    assert (await server.post("/v1/completions", {"prompt": "x", "model": "demo"}))[0] == 404


@pytest.mark.parametrize(
    ("sent", "kept"), [("my-id", True), ("two words", False), ("é", False), ("x" * 500, False)]
)
async def test_the_request_id_is_the_clients_where_it_sent_a_usable_one(
    start: Start, sent: str, *, kept: bool
) -> None:
    server = await start()
    headers = {"x-request-id": sent}
    async with server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        reply_id = response.headers["x-request-id"]
        assert (reply_id == sent) == kept
        assert (await response.json())["id"] == f"cmpl-{reply_id}"


class BreakingRunner:
    """Works until two requests are there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._working = engine.runner

    def execute(self, plan: StepPlan) -> StepResult:
        if self._engine.num_unfinished == 2:
            raise RuntimeError("out of memory")
        return self._working.execute(plan)


async def test_a_fault_of_the_engine_ends_the_server_and_every_request() -> None:
    settings = ServerSettings(port=0, limits=SchedulerLimits(), backend=CostSettings(costs=FAST))
    server = Server(settings)
    server.engine.runner = BreakingRunner(server.engine)

    async def two_requests() -> None:
        body = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}
        async with (
            listening(server, settings) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            running = Running(http, server)
            streamed = asyncio.create_task(running.events("/v1/completions", body))
            await until(lambda: server.engine.num_unfinished == 1)
            whole = asyncio.create_task(running.post("/v1/completions", body))
            try:
                await asyncio.Event().wait()
            finally:
                status, answer = await whole
                assert (status, answer["error"]["code"]) == (500, "engine_stopped")
                assert (await streamed)[-1]["error"]["code"] == "engine_stopped"

    with pytest.raises(ExceptionGroup) as ended:
        await two_requests()
    assert [str(error) for error in ended.value.exceptions] == ["out of memory"]
