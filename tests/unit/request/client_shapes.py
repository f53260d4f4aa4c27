"""Two turns of a conversation as known clients send them, written by hand: the fields, their order, what is
null or left out, and the escapes of the language's JSON. The second turn brings a tool's result.
"""

import json
from typing import Any, Final

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK: Final = "Why is `if a < b && c` false? Ünï 🦊"
SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL: Final = {"type": "function", "function": {"name": "read", "description": "Read", "parameters": SCHEMA}}
CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
RESULT: Final = {"role": "tool", "content": "1: fn <main>", "tool_call_id": "call_1"}
CACHED: Final = {"cache_control": {"type": "ephemeral"}}
THOUGHT: Final = "The condition has two parts."


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def item(role: str, content: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]}


AGENT_A: Final = [
    text("x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=00000;"),
    text("You are a command line agent.", **CACHED),
    text("# Rules\n- Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"}),
]
USE: Final = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}
USED: Final = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1: fn <main>", **CACHED}
ITEM_CALL: Final = {
    "type": "function_call",
    "name": "shell",
    "arguments": '{"command":["ls"]}',
    "call_id": "call_1",
}
ITEM_THOUGHT: Final = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": THOUGHT}],
}

TURNS: Final[dict[str, tuple[str, dict[str, Any], list[Any], list[Any]]]] = {
    "a terminal agent by Messages": (
        MESSAGES,
        {
            "system": AGENT_A,
            "tools": [{"name": "Read", "description": "Read", "input_schema": SCHEMA}],
            "metadata": {"user_id": "user_1_account__session_2"},
            "max_tokens": 32000,
            "thinking": {"budget_tokens": 31999, "type": "enabled"},
            "temperature": 1,
            "stream": True,
        },
        [{"role": "user", "content": [text("<system-reminder>\nToday.\n</system-reminder>"), text(ASK, **CACHED)]}],
        [
            {"role": "assistant", "content": [{"type": "thinking", "thinking": THOUGHT, "signature": "c2ln"}, USE]},
            {"role": "user", "content": [USED]},
        ],
    ),
    "a terminal agent by Responses": (
        RESPONSES,
        {
            "instructions": "You are a coding agent running in a terminal.",
            "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2-4b",
        },
        [item("developer", "Sandbox: read-only."), item("user", "<cwd>/x</cwd>"), item("user", ASK)],
        [ITEM_THOUGHT, ITEM_CALL, {"type": "function_call_output", "call_id": "call_1", "output": "a.py"}],
    ),
    "an editor's agent by chat": (
        CHAT,
        {"tools": [TOOL], "temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
        [{"role": "system", "content": "You are an editor's agent."}, {"role": "user", "content": [text(ASK), text("<open>a</open>")]}],
        [{"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [{"index": 0, **CALL}]}, RESULT],
    ),
    "LangChain": (
        CHAT,
        {"stream": False, "temperature": 0.0, "tools": [TOOL], "max_completion_tokens": None},
        [{"content": "You are a chain.", "role": "system"}, {"content": ASK, "role": "user"}],
        [
            {"content": None, "role": "assistant", "tool_calls": [{**CALL}]},
            {"content": "1: fn <main>", "role": "tool", "tool_call_id": "call_1"},
        ],
    ),
    "LiteLLM": (
        CHAT,
        {"tools": [TOOL], "extra_body": {}, "user": None, "stream_options": None},
        [{"role": "system", "content": [text("You are behind a proxy.", **CACHED)]}, {"role": "user", "content": ASK}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL],
                "function_call": None,
                "reasoning_content": THOUGHT,
                "thinking_blocks": None,
                "provider_specific_fields": {"refusal": None},
            },
            {"name": "read", **RESULT},
        ],
    ),
    "an AI SDK of JavaScript": (
        CHAT,
        {"max_tokens": 4096, "tools": [TOOL], "tool_choice": "auto", "stream": True},
        [{"role": "system", "content": "You are a web app."}, {"role": "user", "content": [text(ASK)]}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    ),
    "an agents SDK of Python": (
        RESPONSES,
        {
            "include": [],
            "instructions": "You are an agent.",
            "tools": [{"name": "shell", "parameters": SCHEMA, "strict": True, "type": "function", "description": "Run"}],
        },
        [{"content": ASK, "role": "user"}],
        [{"id": "fc_1", "status": "completed", **ITEM_CALL}, {"call_id": "call_1", "output": "a.py", "type": "function_call_output"}],
    ),
    "a client of Java": (
        CHAT,
        {"n": 1, "tools": [TOOL], "logit_bias": {}, "stop": None},
        [{"content": "You are a bean.", "role": "developer"}, {"content": [text(ASK)], "role": "user", "name": "ann"}],
        [{"role": "assistant", "refusal": None, "audio": None, "tool_calls": [CALL]}, RESULT],
    ),
    "a client of Go": (
        CHAT,
        {"max_tokens": 100, "tools": [TOOL], "stream": False},
        [{"role": "system", "content": "You are a gopher."}, {"role": "user", "content": ASK}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    ),
}  # fmt: skip


def sent(client: str, *, turns: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of the client's first or second turn."""
    path, fields, first, second = TURNS[client]
    field = "input" if path == RESPONSES else "messages"
    return path, {"model": "m", field: [*first, *(second if turns > 1 else ())], **fields}


def encoded(client: str, body: dict[str, Any]) -> bytes:
    """Return the body as the client's language writes JSON."""
    found = json.dumps(body, separators=(",", ":"), ensure_ascii="JavaScript" not in client)
    if "Go" in client:
        found = found.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    return found.encode()
