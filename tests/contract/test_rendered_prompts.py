"""One prompt begins another in the picker exactly when it does in vLLM: the cases of clients, and generated
conversations. Media, and what docs/clients.md lists as not followed, are left out.
"""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any

import pytest

from epp.request.parse import parse_request
from tests.unit.request.client_shapes import CHAT, MESSAGES, RESPONSES, TURNS, sent, text
from tests.unit.request.test_client_cases import DIFFERENT, EQUAL, billed
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.recording import render

WITHOUT_TEXT = {"the uuid of media", "the uuids of media", "media without a type"}
CASES = {**EQUAL, **DIFFERENT}
WORDS = ("go on", "list the files", "Ünï 🦊", "why?")


def chat(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Return one round of a chat: a question, a loop of tools with thoughts, and an answer."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    thought = (
        {rng.choice(("reasoning", "reasoning_content")): rng.choice(WORDS)} if rng.random() < 0.6 else {}
    )
    return [
        {"role": "user", "content": rng.choice((rng.choice(WORDS), [text(rng.choice(WORDS))]))},
        {"role": "assistant", "content": None, "tool_calls": [call], **thought},
        {"role": "tool", "tool_call_id": f"c{number}", "content": rng.choice(WORDS)},
        {"role": "assistant", "content": rng.choice(WORDS)},
    ]


def messages(rng: random.Random, number: int) -> list[dict[str, Any]]:
    thinking = {"type": "thinking", "thinking": rng.choice(WORDS), "signature": "s"}
    use = {"type": "tool_use", "id": f"c{number}", "name": "ls", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": rng.choice(WORDS)}
    reminder = [text("remember")] if rng.random() < 0.3 else []
    mark = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.5 else {}
    return [
        {"role": "user", "content": [text(rng.choice(WORDS)) | mark]},
        {"role": "assistant", "content": [*([thinking] if rng.random() < 0.6 else []), use]},
        {"role": "user", "content": [result, *reminder]},
        {"role": "assistant", "content": [text(rng.choice(WORDS))]},
    ]


def items(rng: random.Random, number: int) -> list[dict[str, Any]]:
    said = {"type": "reasoning_text", "text": rng.choice(WORDS)}
    thought = {"type": "reasoning", "id": f"r{number}", "summary": [], "content": [said]}
    call = {"type": "function_call", "call_id": f"c{number}", "name": "ls", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": f"c{number}", "output": rng.choice(WORDS)}
    asked = {"role": "user", "content": rng.choice(WORDS)}
    return [asked, *([thought] if rng.random() < 0.6 else []), call, output]


def generated(path: str, *, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return every beginning of some conversations, whose rounds are equal now and then."""
    rng, found = random.Random(seed), []
    make, field = {CHAT: (chat, "messages"), MESSAGES: (messages, "messages"), RESPONSES: (items, "input")}[
        path
    ]
    for each in range(6):
        turns = [turn for number in range(3) for turn in make(rng, number)]
        system = {"system": [text(billed(each)), text("Be kind.")]} if path == MESSAGES else {}
        found += [(path, {field: turns[:end], **system}) for end in range(1, len(turns) + 1)]
    return found


@pytest.mark.vllm
def test_prompts_share_a_beginning_exactly_when_vllms_do(vllm_environment: VllmEnvironment) -> None:
    bodies = [
        (path, body) for name, (path, *two) in CASES.items() if name not in WITHOUT_TEXT for body in two
    ]
    bodies += [sent(client, turns=turns) for client in TURNS for turns in (1, 2)]
    for seed, path in enumerate((CHAT, MESSAGES, RESPONSES)):
        bodies += generated(path, seed=seed)
    theirs = render(vllm_environment, bodies)
    ours = [parse_request(path, json.dumps({"model": "m", **body}).encode()).prompt for path, body in bodies]
    shared = 0
    for a, b in combinations(range(len(bodies)), 2):
        if bodies[a][0] == bodies[b][0]:
            for first, second in ((a, b), (b, a)):
                begins = theirs[second].startswith(theirs[first])
                assert ours[second].startswith(ours[first]) == begins, (bodies[first], bodies[second])
                shared += begins
    assert shared > 100
