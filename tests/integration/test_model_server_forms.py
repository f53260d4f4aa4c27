"""Answers of a form over HTTP: `response_format`, `structured_outputs` and forced calls, in each API."""

import json
from typing import Any

import pytest

from tests.harness.http_model_server import HttpModelServer, Start
from tests.integration.test_model_server_front_ends import named_events

pytest.importorskip("llguidance", reason="requirements/dev.txt has it")

TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
ANSWER = {"town": "word"}
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": TOWN}} for name in ("map", "weather")]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item] # its function
THEIRS = [{"name": name, "input_schema": TOWN} for name in ("map", "weather")]
NAMED = {"type": "function", "function": {"name": "weather"}}
CHAT = "/v1/chat/completions"


async def answer(server: HttpModelServer, path: str, **body: Any) -> Any:
    status, found = await server.post(path, body)
    assert status == 200, found
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": TOWN}}}, ANSWER),
        ({"structured_outputs": {"json": TOWN, "regex": None}}, ANSWER),
        ({"structured_outputs": {"json": json.dumps(TOWN)}}, ANSWER),
        ({"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}}, {}),
    ],
)
async def test_text_has_the_form_that_was_asked_for(
    start: Start, fields: dict[str, Any], expected: object
) -> None:
    server = await start()
    choices = (await answer(server, CHAT, messages=HELLO, n=2, **fields))["choices"]
    assert [json.loads(choice["message"]["content"]) for choice in choices] == [expected] * 2
    [completed] = (await answer(server, "/v1/completions", prompt="Hi", max_tokens=50, **fields))["choices"]
    assert (json.loads(completed["text"]), completed["finish_reason"]) == (expected, "stop")
    events = await server.events("/v1/completions", {"prompt": "Hi", "max_tokens": 50, **fields})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == completed["text"]


async def test_other_front_ends_have_forms_of_text_too(start: Start) -> None:
    server = await start()
    text = {"format": {"type": "json_schema", "name": "town", "schema": TOWN}}
    found = await answer(server, "/v1/responses", input="Hi", text=text)
    assert json.loads(found["output"][0]["content"][0]["text"]) == ANSWER
    config = {"format": {"type": "json_schema", "schema": TOWN}}
    found = await answer(server, "/v1/messages", messages=HELLO, max_tokens=50, output_config=config)
    assert json.loads(found["content"][0]["text"]) == ANSWER


@pytest.mark.parametrize(
    ("choice", "name", "reason"), [("required", "map", "tool_calls"), (NAMED, "weather", "stop")]
)
async def test_a_forced_call_is_in_the_answer_whole_and_streamed(
    start: Start, choice: object, name: str, reason: str
) -> None:
    server = await start()
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
    [whole] = (await answer(server, CHAT, **body))["choices"]
    [call] = whole["message"]["tool_calls"]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, reason)
    assert (call["type"], call["function"]["name"]) == ("function", name)
    assert json.loads(call["function"]["arguments"]) == ANSWER
    events = await server.events(CHAT, body)
    last = events[-2]["choices"][0]
    assert (last["delta"]["tool_calls"][0]["function"], last["finish_reason"]) == (call["function"], reason)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_messages_have_a_forced_call_as_a_block(start: Start, choice: dict[str, str]) -> None:
    server = await start()
    body = {"messages": HELLO, "max_tokens": 50, "tools": THEIRS, "tool_choice": choice}
    whole = await answer(server, "/v1/messages", **body)
    [block] = whole["content"]
    assert (block["type"], block["name"]) == ("tool_use", choice.get("name", "map"))
    assert (block["input"], whole["stop_reason"]) == (ANSWER, "tool_use")
    events = {event["type"]: event for event in await named_events(server, "/v1/messages", body)}
    assert events["content_block_start"]["content_block"]["name"] == block["name"]
    assert json.loads(events["content_block_delta"]["delta"]["partial_json"]) == ANSWER
    assert events["message_delta"]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_responses_have_a_forced_call_as_an_item(start: Start, choice: Any) -> None:
    server = await start()
    body = {"input": "Hi", "tools": FLAT, "tool_choice": choice}
    whole = await answer(server, "/v1/responses", **body)
    assert (whole["tool_choice"], whole["tools"]) == (choice, FLAT)
    [item] = whole["output"]
    assert (item["type"], item["name"]) == ("function_call", "map" if choice == "required" else "weather")
    assert json.loads(item["arguments"]) == ANSWER
    events = await named_events(server, "/v1/responses", body)
    assert [event["type"] for event in events][-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1]["response"]["output"][0]["arguments"] == item["arguments"]


async def test_a_call_that_is_cut_short_stays_a_text(start: Start) -> None:
    server = await start()
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3}
    [choice] = (await answer(server, CHAT, **body))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"name')
    [choice] = (await answer(server, CHAT, **{**body, "max_tokens": 50, "stop": "parameters"}))["choices"]
    assert (choice["finish_reason"], choice["message"]) == (
        "stop",
        {"role": "assistant", "content": '{"name": "map", "'},
    )


@pytest.mark.parametrize("form", [{"type": "json_schema"}, {"type": "json_schema", "schema": {"not": {}}}])
async def test_an_error_names_the_field_that_the_client_sent(start: Start, form: dict[str, Any]) -> None:
    server = await start()
    status, error = await server.post("/v1/responses", {"input": "Hi", "text": {"format": form}})
    assert (status, error["error"]["param"].startswith("text")) == (400, True)
    assert "response_format" not in error["error"]["message"]
    body = {"messages": HELLO, "max_tokens": 5, "output_config": {"format": form}}
    status, error = await server.post("/v1/messages", body)
    assert (status, error["error"]["param"].startswith("output_config")) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "nobody"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"function": {"name": 'a" | "b'}}]}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "json_object": True}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "n": 9}, "n"),
    ],
)
async def test_a_form_that_cannot_be_had_is_refused(start: Start, fields: dict[str, Any], param: str) -> None:
    server = await start()
    status, error = await server.post(CHAT, {"messages": HELLO, **fields})
    assert (status, error["error"]["param"]) == (400, param)
