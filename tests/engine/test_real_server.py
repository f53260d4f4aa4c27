"""A server over a real (tiny, random) model, by its HTTP API."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_server.core.scheduler import SchedulerLimits
from model_server.server.backends import HfSettings
from model_server.server.serve import Server, ServerSettings, listening
from tests.vllm_env import tiny_model

PROMPT = "The import statement finds a module and then"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    tiny_model.write_all(found)
    return found / tiny_model.MODEL


class RealServer:
    def __init__(self, http: aiohttp.ClientSession, server: Server) -> None:
        self.http = http
        self.server = server

    async def post(self, path: str, **body: Any) -> Any:
        async with self.http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def refused(self, path: str, **body: Any) -> Any:
        async with self.http.post(path, json=body) as response:
            assert response.status == 400
            return (await response.json())["error"]

    async def complete(self, prompt: object = PROMPT, **body: Any) -> Any:
        body = {"temperature": 0, "max_tokens": 12, **body}
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def text(self, prompt: object = PROMPT, **body: Any) -> str:
        text: str = (await self.complete(prompt, **body))["choices"][0]["text"]
        return text

    async def streamed(self, path: str, **body: Any) -> list[Any]:
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            lines = (await response.text()).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(folder: Path) -> AsyncIterator[RealServer]:
    settings = ServerSettings(
        port=0,
        model=str(folder),
        served_names=("tiny",),
        num_blocks=128,
        limits=SchedulerLimits(max_num_batched_tokens=64),
        backend=HfSettings(device="cpu", threads=1),
        drain_timeout_s=0.01,
    )
    async with AsyncExitStack() as stack:
        server = Server(settings)
        port = await stack.enter_async_context(listening(server, settings))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        yield RealServer(http, server)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def greedy(plain: Any, tokens: Sequence[int], count: int) -> list[int]:
    sequence = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            sequence.append(int(plain(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(tokens) :]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_greedy_text_equals_that_of_the_plain_model(
    running: RealServer, plain: Any, tokenizer: Any
) -> None:
    expected = tokenizer.decode(greedy(plain, tokenizer(PROMPT)["input_ids"], 12))
    assert await running.text() == expected
    pieces = await running.streamed("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=12)
    assert "".join(event["choices"][0]["text"] for event in pieces) == expected


async def test_a_conversation_is_read_through_the_models_own_template(
    running: RealServer, plain: Any, tokenizer: Any
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a class?"}]
    prompt = "<s><|system|>Be brief.</s><|user|>What is a class?</s><|assistant|>"
    tokens = tokenizer(prompt)["input_ids"]
    tokenized = await running.post("/tokenize", messages=messages)
    assert tokenized == {"count": len(tokens), "max_model_len": 2048, "tokens": tokens}
    assert (await running.post("/detokenize", tokens=tokens))["prompt"] == prompt
    answer = await running.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=8)
    expected = tokenizer.decode(greedy(plain, tokens, 8), skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    refused = await running.refused("/detokenize", tokens=[tiny_model.VOCABULARY])
    assert "does not exist" in refused["message"]


async def test_a_repeated_prompt_is_a_hit_and_says_the_same(running: RealServer) -> None:
    prompt = "A unique beginning. " * 20
    answers = [await running.complete(prompt, cache_salt="once") for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    size = running.server.engine.config.block_size_tokens
    assert cached == [0, (answers[0]["usage"]["prompt_tokens"] - 1) // size * size]


async def test_a_client_sets_the_templates_variables_and_not_the_template(running: RealServer) -> None:
    hi, ok = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}

    async def read(*messages: dict[str, str], **body: Any) -> str:
        tokens = (await running.post("/tokenize", messages=messages, **body))["tokens"]
        text: str = (await running.post("/detokenize", tokens=tokens))["prompt"]
        return text

    assert await read(hi) == "<s><|user|>Hi</s><|assistant|>"
    assert await read(hi, add_generation_prompt=False) == "<s><|user|>Hi</s>"
    assert await read(hi, chat_template_kwargs={"add_generation_prompt": False}) == "<s><|user|>Hi</s>"
    half = {"add_generation_prompt": False, "continue_final_message": True}
    assert await read(hi, ok, **half) == "<s><|user|>Hi</s><|assistant|>ok"
    quick = await read(hi, chat_template_kwargs={"enable_thinking": False})
    assert quick == "<s><|user|>Hi</s><|assistant|>No thoughts, just the answer."
    assert await read(hi, chat_template_kwargs={"unknown_here": False}) == await read(hi)
    for kwargs in ({"chat_template": "{{ 1 }}"}, {"tokenize": False}):
        refused = await running.refused("/v1/chat/completions", messages=[hi], chat_template_kwargs=kwargs)
        assert refused["param"] == "messages"
        assert "cannot be set" in refused["message"]


async def test_equal_seeds_give_equal_answers_whatever_else_runs(running: RealServer) -> None:
    seeded = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
    alone = await running.text(**seeded)
    together = await asyncio.gather(
        running.text(**seeded), *(running.text("Other words", temperature=1.0) for _ in range(4))
    )
    assert together[0] == alone
    assert await running.text(**{**seeded, "seed": 8}) != alone
    assert len({await running.text(temperature=1.0) for _ in range(3)}) == 3


async def test_top_k_of_one_and_a_small_top_p_are_greedy_at_any_temperature(running: RealServer) -> None:
    expected = await running.text()
    assert await running.text(temperature=2.0, top_k=1) == expected
    assert await running.text(temperature=2.0, top_p=1e-9) == expected
    assert await running.text(temperature=2.0, seed=1) != expected


async def test_log_probabilities_are_the_models_own_in_both_shapes(
    running: RealServer, plain: Any, tokenizer: Any
) -> None:
    tokens = tokenizer(PROMPT)["input_ids"]
    answer = (await running.complete(max_tokens=4, logprobs=2))["choices"][0]
    logprobs = answer["logprobs"]
    chosen = greedy(plain, tokens, 4)
    with torch.inference_mode():
        logits = plain(input_ids=torch.tensor([tokens + chosen])).logits[0]
    expected = logits.log_softmax(-1)[len(tokens) - 1 : -1]
    assert logprobs["tokens"] == [tokenizer.decode([token]) for token in chosen]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["text_offset"] == [0, *(len("".join(logprobs["tokens"][:n])) for n in (1, 2, 3))]
    for row, token in enumerate(chosen):
        assert logprobs["token_logprobs"][row] == pytest.approx(float(expected[row, token]), abs=1e-3)
        top = expected[row].topk(2)
        by_text = {tokenizer.decode([int(i)]): float(v) for i, v in zip(top.indices, top.values, strict=True)}
        assert logprobs["top_logprobs"][row] == pytest.approx(by_text, abs=1e-3)

    chat = {"messages": [{"role": "user", "content": "Why?"}], "temperature": 0, "max_tokens": 3}
    whole = await running.post("/v1/chat/completions", **chat, logprobs=True, top_logprobs=1)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for one in content:
        assert one["top_logprobs"] == [{k: one[k] for k in ("token", "logprob", "bytes")}]
        assert bytes(one["bytes"]).decode() == one["token"]
    events = await running.streamed("/v1/chat/completions", **chat, logprobs=True, top_logprobs=1)
    streamed = [event["choices"][0].get("logprobs") for event in events]
    assert [one for logprobs in streamed if logprobs for one in logprobs["content"]] == content


async def test_bias_penalties_and_least_lengths_change_the_answer(running: RealServer) -> None:
    ids = (await running.post("/tokenize", prompt=PROMPT))["tokens"]
    always = await running.text(logit_bias={str(ids[1]): 100}, max_tokens=5)
    assert len(set(always.split())) == 1
    assert await running.text(logit_bias={str(ids[1]): 100}, frequency_penalty=2, max_tokens=5) == always
    assert await running.text(repetition_penalty=5.0, max_tokens=30) != await running.text(max_tokens=30)
    stop = {"logit_bias": {str(ids[1]): 100}, "stop_token_ids": [ids[1]], "max_tokens": 9}
    answer = await running.complete(**stop)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", ids[1])
    answer = await running.complete(**stop, min_tokens=4)
    assert answer["usage"]["completion_tokens"] == 5, "the stop token comes as soon as it may"
    greedy = await running.text(max_tokens=8)
    assert await running.text(temperature=1.5, min_p=1.0, max_tokens=8) == greedy


async def test_each_answer_has_the_form_that_was_asked_for(running: RealServer) -> None:
    yes = {"type": "boolean"}
    schema = {
        "type": "object",
        "properties": {"good": yes, "sizes": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2}},
        "required": ["good", "sizes"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # a random model would write spaces without end
    }
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 400, "structured_outputs": {"json": schema}}
    answer = await running.complete(n=4, **asked)
    for choice in answer["choices"]:
        written = json.loads(choice["text"])
        assert written.keys() == {"good", "sizes"}
        assert isinstance(written["good"], bool)
        assert len(written["sizes"]) >= 2
        assert set(written["sizes"]) <= {1, 22}
        assert choice["finish_reason"] == "stop"
    assert await running.text(**asked) == answer["choices"][0]["text"], "answers do not share their state"


async def test_a_real_model_calls_the_tool_that_it_must(running: RealServer) -> None:
    size = {"type": "object", "properties": {"size": {"enum": [1, 22]}}, "required": ["size"]}
    strict = {**size, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": strict}} for name in ("big", "small")
    ]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 100}
    answer = await running.post("/v1/chat/completions", **body, tool_choice="required", temperature=0)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("big", "small")
    assert json.loads(call["function"]["arguments"])["size"] in (1, 22)


async def test_streamed_pieces_never_cut_a_character(running: RealServer) -> None:
    """A random model also writes bytes that are not text. The pieces together are what the whole answer
    decodes to.
    """
    asked = {"prompt": "é", "temperature": 1.5, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    events = await running.streamed("/v1/completions", **asked)
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == await running.text(**asked)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "must be between 0 and 2"),
        ("prompt", [1, 4_000_000], "4000000"),
        ("top_p", 0, "over 0"),
        ("logprobs", 21, "between 0 and 20"),
        ("min_p", 2, "between 0 and 1"),
        ("logit_bias", {"4000000": 1}, "4000000"),
        ("stop_token_ids", [4_000_000], "4000000"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "Unimplemented"),
    ],
)
async def test_requests_that_the_engine_cannot_serve_are_refused(
    running: RealServer, field: str, value: object, message: str
) -> None:
    error = await running.refused("/v1/completions", **{"prompt": "x", field: value})
    assert message in error["message"]
    assert error["param"] == field
    assert await running.text(max_tokens=1)


async def test_tokens_that_the_model_lacks_are_refused_and_harm_no_other_request(running: RealServer) -> None:
    size = running.server.backend.vocabulary_size
    assert size is not None
    assert (await running.refused("/v1/completions", prompt=[[5], [size]]))["param"] == "prompt"
    assert (await running.complete([size - 1]))["usage"]["prompt_tokens"] == 1
    assert (await running.refused("/detokenize", tokens=[-1]))["param"] == "tokens[0]"
    assert (await running.refused("/detokenize", tokens=[2**70]))["param"] == "tokens[0]"


async def test_a_temperature_too_small_to_divide_by_is_greedy(running: RealServer) -> None:
    assert await running.text(temperature=5e-324) == await running.text()


async def test_several_answers_to_one_prompt_differ_and_share_its_blocks(running: RealServer) -> None:
    prompt = "Some words that fill a few blocks of the cache. " * 10
    asked = {"temperature": 1.0, "seed": 7, "cache_salt": "several", "ignore_eos": True}
    answer = await running.complete(prompt, n=3, **asked)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[:1] == [await running.text(prompt, **asked)]
    assert answer["usage"]["completion_tokens"] == 36
    alone = (await running.complete(prompt, **asked))["usage"]
    assert answer["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (await running.refused("/v1/completions", prompt=prompt, n=2, temperature=0))["param"] == "n"


async def test_metrics_count_the_tokens_that_were_really_computed(running: RealServer) -> None:
    await running.text()
    async with running.http.get("/metrics") as response:
        page = await response.text()
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page
