"""Sends what the `openai`, `anthropic` and `langchain-openai` clients send to a gateway, and prints the
outcome of each case as a JSON object on the last line: `ok`, or the client's own error with its status. It
runs in the environment of clients, not in ours.

    python live_clients.py URL MODEL WORDS PICTURE

WORDS is the number of words that is too long a prompt for the model, and PICTURE the URL of a picture.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "parameters": TOWN}
SCHEMA = {"name": "town", "schema": TOWN}
HELLO = [{"role": "user", "content": "Hello, which town is it?"}]
Case = Callable[[], Awaitable[None]]


def user(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def picture(url: str) -> list[dict[str, Any]]:
    return user({"type": "image_url", "image_url": {"url": url}})


class Calls:
    """The calls of both clients. Each raises the client's error, or AssertionError if the answer is not
    whole.
    """

    def __init__(self, openai: Any, anthropic: Any, model: str) -> None:
        self._openai = openai
        self._anthropic = anthropic
        self._model = model

    async def models(self) -> None:
        assert self._model in [each.id async for each in await self._openai.models.list()]

    async def chat(self, **fields: Any) -> Any:
        usual = {"model": self._model, "messages": HELLO, "max_tokens": 8}
        answer = await self._openai.chat.completions.create(**{**usual, **fields})
        if not fields.get("stream"):
            assert answer.choices[0].finish_reason, answer
            assert answer.usage.prompt_tokens > 0
        return answer

    async def stream(self) -> None:
        stream = await self.chat(stream=True, stream_options={"include_usage": True})
        assert [chunk async for chunk in stream][-1].usage.completion_tokens > 0

    async def leave(self) -> None:
        stream = await self.chat(stream=True, max_tokens=400)
        await anext(aiter(stream))
        await stream.close()

    async def structured(self) -> None:
        answer = await self.chat(
            max_tokens=60, response_format={"type": "json_schema", "json_schema": SCHEMA}
        )
        assert answer.choices[0].message.content.lstrip().startswith("{")

    async def forced(self, choice: Any) -> None:
        tool = {"type": "function", "function": TOOL}
        fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 200}
        [call] = (await self.chat(**fields)).choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert call.function.arguments.lstrip().startswith("{")

    async def embeddings(self) -> None:
        await self._openai.embeddings.create(model=self._model, input=["Ulm", "Bonn"])

    async def respond(self, text: Any, **fields: Any) -> Any:
        return await self._openai.responses.create(
            model=self._model, input=text, max_output_tokens=8, **fields
        )

    async def state(self) -> None:
        first = await self.respond("My town is Ulm.")
        assert (await self.respond("Which town?", previous_response_id=first.id)).id != first.id

    async def streamed_response(self) -> None:
        kinds = [event.type async for event in await self.respond("Hello", stream=True)]
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds

    async def message(self, **fields: Any) -> None:
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        usual = {"model": self._model, "system": system, "messages": HELLO, "max_tokens": 8}
        assert (await self._anthropic.messages.create(**{**usual, **fields})).usage.output_tokens > 0

    async def streamed_message(self) -> None:
        async with self._anthropic.messages.stream(model=self._model, messages=HELLO, max_tokens=8) as stream:
            pieces = [text async for text in stream.text_stream]
            whole = await stream.get_final_message()
        assert "".join(pieces) == whole.content[0].text
        assert whole.stop_reason

    async def tool_loop(self) -> None:
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ulm"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}
        tool = {"name": "weather", "input_schema": TOWN}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        await self.message(messages=[*HELLO, *turns], tools=[tool])

    async def twenty(self) -> None:
        await asyncio.gather(*(self.chat() for _ in range(20)))


class LangChain:
    """The calls of LangChain's `ChatOpenAI` and `OpenAIEmbeddings`."""

    def __init__(self, url: str, model: str) -> None:
        self._usual = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}

    def chat(self, **fields: Any) -> Any:
        from langchain_openai import ChatOpenAI  # noqa: PLC0415 - our own environment has no clients

        return ChatOpenAI(**{**self._usual, "max_tokens": 60, **fields})

    async def say(self, **fields: Any) -> None:
        assert (await self.chat(**fields).ainvoke("Hello")).usage_metadata["output_tokens"] > 0

    async def stream(self, **fields: Any) -> None:
        pieces = [piece async for piece in self.chat(stream_usage=True, **fields).astream("Hello")]
        assert any(piece.content for piece in pieces)
        assert any(piece.usage_metadata for piece in pieces)

    async def tool_loop(self, **fields: Any) -> None:
        tool = {"type": "function", "function": TOOL}
        chat = self.chat(**fields)
        called = await chat.bind_tools([tool], tool_choice="weather").ainvoke("Hello")
        [call] = called.tool_calls
        assert (call["name"], set(call["args"])) == ("weather", {"town"})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
        assert (await chat.bind_tools([tool]).ainvoke([*HELLO, called, result])).id

    async def structured(self) -> None:
        schema = {"title": "town", **TOWN}
        chat = self.chat(temperature=0).with_structured_output(schema, method="json_schema")
        found = await chat.ainvoke("Hello")
        assert found["town"] in ("Ulm", "Bonn")

    async def embeddings(self) -> None:
        from langchain_openai import OpenAIEmbeddings  # noqa: PLC0415

        embed = OpenAIEmbeddings(**self._usual, check_embedding_ctx_length=False)
        assert len(await embed.aembed_documents(["Ulm", "Bonn"])) == 2


def cases(calls: Calls, chain: LangChain, *, words: int, url: str) -> Mapping[str, Case]:
    """Return the cases by name."""
    tool = {"type": "function", "function": TOOL}
    return {
        "models": calls.models,
        "chat": calls.chat,
        "stream": calls.stream,
        "tools that need not be used": lambda: calls.chat(tools=[tool], tool_choice="none"),
        "structured output": calls.structured,
        "a tool that must be used": lambda: calls.forced(
            {"type": "function", "function": {"name": "weather"}}
        ),
        "image by data": lambda: calls.chat(messages=picture(PIXEL)),
        "image by URL": lambda: calls.chat(messages=picture(url)),
        "image in a message": lambda: calls.message(messages=user({"type": "image", "source": SOURCE})),
        "image in a response": lambda: calls.respond(user({"type": "input_image", "image_url": PIXEL})),
        "embeddings": calls.embeddings,
        "responses with state": calls.state,
        "streamed response": calls.streamed_response,
        "messages": calls.message,
        "messages with thinking": lambda: calls.message(thinking={"type": "adaptive"}),
        "streamed message": calls.streamed_message,
        "wrong model": lambda: calls.chat(model="nobody"),
        "wrong model of messages": lambda: calls.message(model="nobody"),
        "too long": lambda: calls.chat(messages=user({"type": "text", "text": "word " * words})),
        "left early": calls.leave,
        "messages with a tool's result": calls.tool_loop,
        "twenty at once": calls.twenty,
        "LangChain": chain.say,
        "LangChain streams": chain.stream,
        "LangChain and tools": chain.tool_loop,
        "LangChain's structured output": chain.structured,
        "LangChain's embeddings": chain.embeddings,
        "LangChain by responses": lambda: chain.say(use_responses_api=True),
        "LangChain streams responses": lambda: chain.stream(use_responses_api=True),
        "LangChain's tools by responses": lambda: chain.tool_loop(use_responses_api=True),
        "LangChain asks for a wrong model": lambda: chain.say(model="nobody"),
    }


async def outcome(case: Case) -> str:
    try:
        await case()
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 - the clients' own errors are the outcome
        return f"{type(error).__name__} {getattr(error, 'status_code', '')}".strip()
    return "ok"


async def main(url: str, model: str, words: str, shown: str) -> None:
    from anthropic import AsyncAnthropic  # noqa: PLC0415 - our own environment has no clients
    from openai import AsyncOpenAI  # noqa: PLC0415

    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic,
    ):
        calls = Calls(openai, anthropic, model)
        table = cases(calls, LangChain(url, model), words=int(words), url=shown)
        print(json.dumps({name: await outcome(case) for name, case in table.items()}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
