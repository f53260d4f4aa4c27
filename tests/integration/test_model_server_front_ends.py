"""`/v1/messages`, `/v1/responses` and `/v1/embeddings`: other front ends of the same engine."""

import base64
import json
import re
import struct
import threading
from typing import Any

import pytest

from tests.harness.http_model_server import PROMPT, HttpModelServer, Start
from tests.unit.request.client_shapes import TURNS as CLIENTS
from tests.unit.request.client_shapes import sent

USER = {"role": "user", "content": PROMPT}
MESSAGES = {"max_tokens": 20, "messages": [USER]}


async def named_events(server: HttpModelServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with server.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        pieces = (await response.text()).split("\n\n")
    assert pieces.pop() == ""
    found = []
    for piece in pieces:
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_messages_answer_as_chat_does_and_share_its_cache(start: Start) -> None:
    server = await start()
    body = {"max_tokens": 20, "messages": [{"role": "system", "content": "Be brief."}, USER]}
    _, chat = await server.post("/v1/chat/completions", body)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    status, answer = await server.post("/v1/messages", {**MESSAGES, "system": system})
    assert status == 200
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == 20
    assert usage["cache_read_input_tokens"] >= 16
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    _, counted = await server.post("/v1/messages/count_tokens", {"messages": [USER], "system": system})
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]
    events = await named_events(server, "/v1/messages", {**MESSAGES, "system": system})
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == answer["content"][0]["text"]
    assert (events[0]["type"], events[0]["message"]["content"]) == ("message_start", [])
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 20


async def test_a_stop_sequence_ends_a_message_and_is_named(start: Start) -> None:
    server = await start()
    _, whole = await server.post("/v1/messages", MESSAGES)
    word = whole["content"][0]["text"].split()[3]
    _, answer = await server.post("/v1/messages", {**MESSAGES, "stop_sequences": [word]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
    assert word not in answer["content"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_on_from_an_earlier_one(start: Start, *, stream: bool) -> None:
    server = await start()
    body = {"input": PROMPT, "max_output_tokens": 20, "instructions": "Be brief."}
    if stream:
        events = await named_events(server, "/v1/responses", body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        first = events[-1]["response"]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == first["output"][0]["content"][0]["text"]
    else:
        _, first = await server.post("/v1/responses", body)
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    text = first["output"][0]["content"][0]["text"]
    more = {"input": "Go on.", "max_output_tokens": 5}
    _, second = await server.post("/v1/responses", {**more, "previous_response_id": first["id"]})
    history = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": [{"type": "output_text", "text": text}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    _, whole = await server.post("/v1/responses", {**more, "input": history})
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]


async def test_a_stored_response_is_read_again_and_forgotten(start: Start) -> None:
    server = await start()

    async def asked(method: str, path: str, **more: Any) -> tuple[int, Any]:
        reply = await server.http.request(method, path, headers={"x-request-id": "mine"}, **more)
        return reply.status, await reply.json()

    body = {"input": PROMPT, "max_output_tokens": 5}
    (_, first), (_, other) = [await asked("POST", "/v1/responses", json=body) for _ in range(2)]
    assert len({first["id"], other["id"], "resp_mine"}) == 3, "who knows the id may read the response"
    path = f"/v1/responses/{first['id']}"
    assert await asked("GET", path) == await asked("GET", f"{path}?stream=false") == (200, first)
    for method, refused in (("POST", f"{path}/cancel"), ("GET", f"{path}?stream=true")):
        assert (await asked(method, refused))[0] == 400, "no response is made in the background"
    deleted = {"id": first["id"], "object": "response", "deleted": True}
    assert await asked("DELETE", path) == (200, deleted)
    for method, gone in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        status, error = await asked(method, gone)
        assert (status, error["error"]["type"]) == (404, "invalid_request_error")
    more = {"input": "Go on.", "previous_response_id": first["id"]}
    assert (await server.post("/v1/responses", more))[0] == 400


async def test_a_response_that_is_not_stored_has_no_next_one(start: Start) -> None:
    server = await start()
    _, first = await server.post("/v1/responses", {"input": "Hi", "store": False})
    for unknown in (first["id"], "resp_nobody"):
        body = {"input": "Go on.", "previous_response_id": unknown}
        status, error = await server.post("/v1/responses", body)
        assert (status, error["error"]["param"]) == (400, "previous_response_id")


TURNS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "a.py"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}]},
    ],
    "/v1/messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "tool_use", "id": "c", "name": "ls", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a.py"}]}]},
        {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}]},
    ],
    "/v1/responses": [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None, "encrypted_content": "c2ln"},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,QQ==", "detail": "auto"}]},
    ],
}  # fmt: skip


async def test_calls_their_results_and_a_picture_are_one_prompt_in_every_api(start: Start) -> None:
    server, texts, before = await start(), {}, set(threading.enumerate())
    for path, turns in TURNS.items():
        body = {"input": [USER, *turns], "messages": [USER, *turns], "max_output_tokens": 9, "max_tokens": 9}
        status, answer = await server.post(path, body)
        assert status == 200, answer
        [texts[path]] = re.findall(r"'(?:content|text)': '([^']+)'", str(answer))
    assert len(set(texts.values())) == 1
    assert "request-reader_0" in {each.name for each in set(threading.enumerate()) - before}


async def test_a_call_in_a_kept_response_is_one_of_its_turns(start: Start) -> None:
    server = await start()
    tool = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
    _, first = await server.post("/v1/responses", {"input": "Hi", "tools": [tool], "tool_choice": "required"})
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
    named = {"input": [result], "previous_response_id": first["id"]}
    whole = {"input": [{"role": "user", "content": "Hi"}, call, result]}
    one, other = [(await server.post("/v1/responses", body))[1] for body in (named, whole)]
    assert one["output"][0]["content"] == other["output"][0]["content"]


SMALLEST = {"messages": [USER], "input": PROMPT, "max_tokens": 20, "max_output_tokens": 20}


@pytest.mark.parametrize("path", TURNS)
async def test_stop_ends_the_answer_in_every_api(start: Start, path: str) -> None:
    server = await start()
    text = re.compile(r"'(?:content|text)': '([^']+)'")
    [whole] = text.findall(str((await server.post(path, SMALLEST))[1]))
    word = whole.split()[3]
    [cut] = text.findall(str((await server.post(path, {**SMALLEST, "stop": [word]}))[1]))
    assert cut == whole[: whole.index(word)]


@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize(("field", "wrong"), [("seed", "x"), ("stop[0]", [""]), ("stop", 1)])
async def test_stop_and_seed_are_checked_in_every_api(
    start: Start, path: str, field: str, wrong: object
) -> None:
    status, error = await (await start()).post(path, {**SMALLEST, field.removesuffix("[0]"): wrong})
    assert (status, error["error"]["param"]) == (400, field)


@pytest.mark.parametrize("client", [name for name, turn in CLIENTS.items() if turn[0] in TURNS])
@pytest.mark.parametrize("turns", [1, 2])
async def test_known_clients_without_thoughts_go_on(start: Start, client: str, turns: int) -> None:
    """What switches thoughts on is refused, and the error says what to write."""
    server = await start()
    path, body = sent(client, turns=turns)
    body = {**body, "model": "demo", "stream": False, "stream_options": None}
    for field, off in (("thinking", '{"type":"disabled"}'), ("reasoning", "{}")):
        if field in body:
            status, error = await server.post(path, body)
            assert (status, error["error"]["param"]) == (400, field)
            assert f"leave it out, or write {off}." in error["error"]["message"]
            body[field] = json.loads(off)
    body = {name: 99 if "max" in name else value for name, value in body.items()}
    status, answer = await server.post(path, body)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "cached"),
    [
        ("/v1/messages", lambda usage: usage["cache_read_input_tokens"]),
        ("/v1/responses", lambda usage: usage["input_tokens_details"]["cached_tokens"]),
    ],
)
async def test_a_salt_counts_in_every_api(start: Start, path: str, cached: Any) -> None:
    server = await start()
    body = {"messages": [USER], "input": PROMPT, "max_tokens": 9, "max_output_tokens": 9, "seed": 3}
    found = [(await server.post(path, {**body, "cache_salt": salt}))[1]["usage"] for salt in "aba"]
    assert [cached(usage) > 0 for usage in found] == [False, False, True]
    status, error = await server.post(path, {**body, "cache_salt": ""})
    assert (status, error["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages/batches", "not_found_error"), ("/v1/files", "invalid_request_error")]
)
async def test_an_unknown_path_has_the_error_of_its_api(start: Start, path: str, kind: str) -> None:
    server = await start()
    async with server.http.put(path, data=b"{}") as response:
        error = await response.json()
    assert (response.status, error["error"]["type"], bool(error["error"]["message"])) == (404, kind, True)
    assert (error.get("type") == "error") == (kind == "not_found_error")


async def test_embeddings_are_equal_for_equal_prompts_in_either_encoding(start: Start) -> None:
    server = await start()
    body: dict[str, Any] = {"input": ["one", "two", "one"], "dimensions": 8}
    status, plain = await server.post("/v1/embeddings", body)
    assert status == 200
    one, two, again = [item["embedding"] for item in plain["data"]]
    assert one == again != two
    assert sum(number * number for number in one) == pytest.approx(1)
    _, packed = await server.post("/v1/embeddings", {**body, "encoding_format": "base64"})
    first = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack("<8f", first) == pytest.approx(one)
    assert plain["usage"]["total_tokens"] == 3
    _, cut = await server.post(
        "/v1/embeddings", {"input": "two one", "dimensions": 8, "truncate_prompt_tokens": 1}
    )
    assert cut["usage"]["total_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {**MESSAGES, "tool_choice": {"type": "any"}}, "tool_choice"),  # there is no tool
        ("/v1/messages", {**MESSAGES, "output_config": {"effort": "low"}}, "output_config"),
        ("/v1/messages", {**MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ("/v1/messages", {**MESSAGES, "messages": "Hi"}, "messages"),
        ("/v1/messages", {**MESSAGES, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ("/v1/messages", {**MESSAGES, "stop": ["a"], "stop_sequences": ["b"]}, "stop"),
        ("/v1/messages", {"messages": [USER]}, "max_tokens"),
        ("/v1/messages", b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","input":{"a":"\xff"}}]}]}', "messages"),
        ("/v1/responses", {"input": "Hi", "text": {"verbosity": "low"}}, "text"),
        ("/v1/responses", {"input": "Hi", "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "Hi", "background": True}, "background"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ("/v1/embeddings", {"input": "Hi", "dimensions": 100_000}, "dimensions"),
        ("/v1/embeddings", {"input": "Hi", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "Hi", "embed_dtype": "float16"}, "embed_dtype"),
    ],
)  # fmt: skip
async def test_what_is_not_done_is_refused(start: Start, path: str, body: Any, param: str) -> None:
    server = await start()
    status, error = await server.post(path, body)
    assert (status, error["error"]["param"]) == (400, param)
    assert (error.get("type") == "error") == (path == "/v1/messages")
