"""Sends what the `openai` and `anthropic` clients send to a gateway, and prints the outcome of each case as a
JSON object on the last line: `ok`, or the client's own error with its status. It runs inside the vLLM
environment, which has both clients, not in ours.

    python live_clients.py URL MODEL WORDS

WORDS is the number of words that is too long a prompt for the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
SCHEMA = {
    "name": "town",
    "schema": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
HELLO = [{"role": "user", "content": "Hello, which town is it?"}]
Case = Callable[[], Awaitable[None]]


def cases(openai: Any, anthropic: Any, model: str, *, words: int) -> Mapping[str, Case]:
    """Return the cases by name. Each raises the client's error, or AssertionError if the answer is not
    whole.
    """

    async def chat(**fields: Any) -> Any:
        answer = await openai.chat.completions.create(model=model, messages=HELLO, max_tokens=8, **fields)
        assert answer.choices[0].finish_reason, answer
        assert answer.usage.prompt_tokens > 0
        return answer

    async def chat_with(content: Any) -> None:
        await openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], max_tokens=4
        )

    async def stream() -> None:
        stream = await openai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens > 0

    async def leave() -> None:
        stream = await openai.chat.completions.create(
            model=model, messages=HELLO, max_tokens=400, stream=True
        )
        await anext(aiter(stream))
        await stream.close()

    async def structured() -> None:
        answer = await openai.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": SCHEMA},
        )
        assert answer.choices[0].message.content.lstrip().startswith("{")

    async def state() -> None:
        first = await openai.responses.create(model=model, input="My town is Ulm.", max_output_tokens=8)
        again = await openai.responses.create(
            model=model, input="Which town?", previous_response_id=first.id, max_output_tokens=8
        )
        assert again.id != first.id

    async def streamed_response() -> None:
        stream = await openai.responses.create(model=model, input="Hello", max_output_tokens=8, stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds

    async def message(**fields: Any) -> None:
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        answer = await anthropic.messages.create(
            model=model, system=system, messages=HELLO, max_tokens=8, **fields
        )
        assert answer.usage.output_tokens > 0

    async def streamed_message() -> None:
        async with anthropic.messages.stream(model=model, messages=HELLO, max_tokens=8) as stream:
            assert [text async for text in stream.text_stream]

    return {
        "models": lambda: _listed(openai, model),
        "chat": chat,
        "stream": stream,
        "tools that need not be used": lambda: chat(tools=[{"type": "function", "function": TOOL}], tool_choice="none"),
        "structured output": structured,
        "image by data": lambda: chat_with([{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "What?"}]),
        "embeddings": lambda: openai.embeddings.create(model=model, input=["Ulm", "Bonn"]),
        "responses with state": state,
        "streamed response": streamed_response,
        "messages": message,
        "messages with thinking": lambda: message(thinking={"type": "adaptive"}),
        "streamed message": streamed_message,
        "wrong model": lambda: openai.chat.completions.create(model="nobody", messages=HELLO),
        "wrong model of messages": lambda: anthropic.messages.create(model="nobody", messages=HELLO, max_tokens=4),
        "too long": lambda: chat_with("word " * words),
        "left early": leave,
        "twenty at once": lambda: asyncio.gather(*(chat() for _ in range(20))),
    }  # fmt: skip


async def _listed(openai: Any, model: str) -> None:
    assert model in [each.id async for each in await openai.models.list()]


async def outcome(case: Case) -> str:
    try:
        await case()
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 - the clients' own errors are the outcome
        return f"{type(error).__name__} {getattr(error, 'status_code', '')}".strip()
    return "ok"


async def main(url: str, model: str, words: str) -> None:
    from anthropic import AsyncAnthropic  # noqa: PLC0415 - our own environment has neither client
    from openai import AsyncOpenAI  # noqa: PLC0415

    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic,
    ):
        table = cases(openai, anthropic, model, words=int(words))
        print(json.dumps({name: await outcome(case) for name, case in table.items()}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
