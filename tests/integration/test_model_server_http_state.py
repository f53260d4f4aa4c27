"""The model server over HTTP: who shares a cache, adapters, metrics, tokens."""

import asyncio

from model_server.core.scheduler import SchedulerLimits
from tests.harness.http_model_server import NEVER_ENDING, PROMPT, Start, until


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
    assert await server.cached(model="new") == 0  # other weights need another cache


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
    assert await server.ended() == {"stop": 0, "length": 2, "abort": 0}
    [(info, one)] = metrics["vllm:cache_config_info"]
    assert one == 1
    assert info["block_size"] == "16"
    assert info["num_gpu_blocks"] == "512"
    assert info["kv_cache_size_tokens"] == str(512 * 16)
    assert info["enable_prefix_caching"] == "True"


async def test_lora_info_appears_with_the_first_request_for_an_adapter(start: Start) -> None:
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


async def test_tokenize_counts_what_a_request_will_count(start: Start) -> None:
    server = await start()
    _, tokens = await server.post("/tokenize", {"prompt": PROMPT})
    assert tokens["count"] == len(tokens["tokens"]) == (await server.complete())["usage"]["prompt_tokens"]
    messages = [{"role": "user", "content": "Hi"}]
    _, chat = await server.post("/tokenize", {"messages": messages})
    _, answer = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    assert (await server.post("/tokenize", {}))[0] == 400


async def test_detokenize_gives_the_text_of_answer_back_and_refuses_other_tokens(start: Start) -> None:
    server = await start()
    text = (await server.complete(max_tokens=20))["choices"][0]["text"]
    _, tokens = await server.post("/tokenize", {"prompt": text})
    assert await server.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": text})
    status, answer = await server.post("/detokenize", {"tokens": [1]})
    assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_small_pages_answer_and_every_served_name_is_accepted(start: Start) -> None:
    server = await start(served_names=("one", "two"))
    for path in ("/health", "/ping", "/version", "/kv_event_sources"):
        async with server.http.get(path) as response:
            assert response.status == 200
    assert (await server.complete(model="two"))["model"] == "two"
    assert (await server.post("/v1/completions", {"prompt": "x", "model": "demo"}))[0] == 404
