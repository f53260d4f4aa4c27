"""The same requests go to vLLM and to our model server. Status codes, shapes, ends of answers and counts of
tokens are equal. Each field of ours is also in vLLM's answer and has the same type. vLLM has more fields.

Some requests are treated differently on purpose (echo, prompt_logprobs, tools without a parser, bodies not
called JSON). They are in docs/model-server.md and not here.
"""

import asyncio
import json
from typing import Any

import pytest

from model_server.core.request import Adapter
from tests.harness.http_model_server import HttpModelServer, Start
from tests.vllm_env.server import MODEL_NAME, VllmServer

pytestmark = pytest.mark.vllm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
MAX_LEN = 8192

FIELDS_OF_COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no model": {"model": None},
    "an empty model": {"model": ""},
    "an unknown model": {"model": "nope"},
    "an adapter": {"model": "alpha"},
    "no max_tokens": {"max_tokens": None},
    "max_tokens 0": {"max_tokens": 0},
    "more than the model's length": {"max_tokens": 10**30},
    "max_tokens with a fraction": {"max_tokens": 5.5},
    "numbers as text and with a point": {"max_tokens": "4", "n": 2.0, "temperature": "0.5"},
    "n 0": {"n": 0},
    "n 2": {"n": 2, "temperature": 0.5},
    "n 2 of two prompts": {"n": 2, "temperature": 0.5, "prompt": ["a b", "c"]},
    "logprobs over the limit": {"logprobs": 21},
    "suffix": {"suffix": "x"},
    "an empty stop string": {"stop": ""},
    "no stop strings": {"stop": []},
    "a number to stop at": {"stop": 5},
    "no text": {"prompt": ""},
    "no tokens": {"prompt": []},
    "a list of no tokens": {"prompt": [[]]},
    "no prompt": {"prompt": None},
    "a number for a prompt": {"prompt": 5},
    "two prompts": {"prompt": ["a b", "c"]},
    "tokens": {"prompt": [5, 6, 7]},
    "two prompts of tokens": {"prompt": [[5, 6], [7]]},
    "tokens and text": {"prompt": [5, "a"]},
    "a negative token": {"prompt": [-5]},
    "a prompt over the model's length": {"prompt": "word " * 20_000},
    "tokens over the model's length": {"prompt": [5] * 20_000},
    "options of a stream without one": {"stream_options": {"include_usage": True}},
    "a negative temperature": {"temperature": -1},
    "a temperature over 2": {"temperature": 2.5},
    "fewer tokens than it should have": {"min_tokens": 6},
    "min_tokens -1": {"min_tokens": -1},
    "a presence penalty of 3": {"presence_penalty": 3},
    "a frequency penalty of -3": {"frequency_penalty": -3},
    "a repetition penalty of 0": {"repetition_penalty": 0},
    "min_p 2": {"min_p": 2},
    "penalties, a bias and a stop token": {
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.5,
        "min_p": 0.5,
        "min_tokens": 5,
        "logit_bias": {"5": 1},
        "stop_token_ids": [6],
    },
    "a tiny temperature": {"temperature": 1e-300},
    "top_p 0": {"top_p": 0},
    "top_k -1": {"top_k": -1},
    "top_k -5": {"top_k": -5},
    "a negative seed": {"seed": -5},
    "a cache salt": {"cache_salt": "s"},
    "an empty cache salt": {"cache_salt": ""},
    "a field that nobody knows": {"never_heard_of": 1},
}
FIELDS_OF_CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens wins": {"max_completion_tokens": 3},
    "n 2": {"n": 2, "temperature": 0.5},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "parts that are no objects": {"messages": [{"role": "user", "content": ["Hi"]}]},
    "no messages": {"messages": []},
    "a text for messages": {"messages": "hi"},
    "a message without a role": {"messages": [{"content": "x"}]},
    "a message without content": {"messages": [{"role": "user"}]},
    "a number for content": {"messages": [{"role": "user", "content": 5}]},
    "a role of its own": {"messages": [{"role": "critic", "content": "x"}]},
    "top_logprobs alone": {"top_logprobs": 1},
}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, {}),
    "completions with usage": (COMPLETIONS, {"stream_options": {"include_usage": True}}),
    "completions with usage in each event": (
        COMPLETIONS,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat": (CHAT, {}),
    "chat with usage": (CHAT, {"stream_options": {"include_usage": True}}),
}
RAW = {
    "half of an object": b"{",
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"x"',
    "bytes that are no text": b'{"prompt": "\xff"}',
    "a depth of 100,000": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "no number": b'{"prompt": "x", "temperature": NaN}',
    "a number beyond all": b'{"prompt": "x", "temperature": 1e999}',
}
PAGES = [
    ("GET", COMPLETIONS),
    ("POST", "/v1/nope"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/kv_event_sources"),
]


class Sides:
    def __init__(self, vllm: VllmServer, ours: HttpModelServer) -> None:
        self._vllm = vllm
        self._ours = ours

    async def both(self, method: str, path: str, body: Any = None) -> list[tuple[int, str]]:
        """Return status and text of vLLM's answer, then of ours."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        theirs = (
            await asyncio.to_thread(self._vllm.post, path, raw or b"")
            if method == "POST"
            else await asyncio.to_thread(self._vllm.get, path)
        )
        headers = {"content-type": "application/json"}
        async with self._ours.http.request(method, path, data=raw, headers=headers) as answer:
            return [(theirs.status, theirs.body.decode()), (answer.status, await answer.text())]


@pytest.fixture
async def sides(vllm_servers: tuple[VllmServer, VllmServer], start: Start) -> Sides:
    ours = await start(served_names=(MODEL_NAME,), adapters=(Adapter("alpha"),), max_model_len_tokens=MAX_LEN)
    return Sides(vllm_servers[0], ours)


def shape(value: Any, *, known: Any) -> Any:
    """Return the names and types in `value`. Of a list or an object it keeps only what `known`, another
    answer to the same request, has too.
    """
    if isinstance(value, dict) and isinstance(known, dict):
        return {name: shape(inner, known=known[name]) for name, inner in value.items() if name in known}
    if isinstance(value, list) and isinstance(known, list):
        return [shape(inner, known=other) for inner, other in zip(value, known, strict=False)]
    return type(value).__name__


def facts(answer: str) -> list[Any]:
    """Return the fields of an answer that a client reads, whole or streamed, without the text."""
    whole = json.loads(answer)
    ends = [(choice["index"], choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
    return [whole["object"], whole["model"], ends, whole["usage"]["completion_tokens"]]


async def test_every_answer_has_vllms_status_fields_ends_and_token_counts(sides: Sides) -> None:
    usual = {"model": MODEL_NAME, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    asked = {
        f"completions: {name}": (COMPLETIONS, {**usual, "prompt": "Hello", **fields})
        for name, fields in FIELDS_OF_COMPLETIONS.items()
    }
    asked |= {
        f"chat: {name}": (CHAT, {**usual, "messages": MESSAGES, **fields})
        for name, fields in FIELDS_OF_CHAT.items()
    }
    differ = {}
    for name, (path, body) in asked.items():
        (status, theirs), (our_status, ours) = await sides.both("POST", path, body)
        if status != our_status:
            differ[name] = f"{status} {theirs[:200]} / {our_status} {ours[:200]}"
        elif status == 200:
            a, b = json.loads(theirs), json.loads(ours)
            missing = shape(b, known=a)
            if facts(theirs) != facts(ours) or missing != shape(b, known=b) or shape(a, known=b) != missing:
                differ[name] = f"{theirs} / {ours}"
        elif "error" in json.loads(theirs):
            assert json.loads(ours)["error"]["message"]
    assert differ == {}


async def test_invalid_bodies_and_other_pages_have_vllms_status(sides: Sides) -> None:
    answers = {name: await sides.both("POST", COMPLETIONS, raw) for name, raw in RAW.items()}
    answers |= {
        f"{method} {path}": await sides.both(method, path, {} if method == "POST" else None)
        for method, path in PAGES
    }
    assert {name: (a[0], b) for name, (a, b) in answers.items() if a[0] != b[0]} == {}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_has_vllms_events(sides: Sides, name: str) -> None:
    path, fields = STREAMS[name]
    prompt = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {
        "model": MODEL_NAME,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **prompt,
        **fields,
    }
    shapes = []
    for status, text in await sides.both("POST", path, body):
        assert status == 200, text
        *events, done, nothing = text.split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        read = [json.loads(event.removeprefix("data: ")) for event in events]
        with_choices = [event for event in read if event["choices"]]
        shapes.append(
            {
                "role": [c["delta"].get("role") for e in with_choices for c in e["choices"] if "delta" in c][
                    :1
                ],
                "ends": [c["finish_reason"] for e in with_choices for c in e["choices"]][-1],
                "usage": [e["usage"]["completion_tokens"] for e in read if e.get("usage")][-1:],
                "usage beside text": all(e.get("usage") for e in with_choices),
                "the last event": sorted(
                    read[-1].keys() & {"id", "object", "created", "model", "choices", "usage"}
                ),
            }
        )
    assert shapes[1] == shapes[0]
