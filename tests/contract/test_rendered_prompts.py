"""Two prompts part in the picker where they part in vLLM: the cases of clients, and generated histories of
which one thing changes. What docs/clients.md lists as not followed may part earlier, and never later.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import combinations, count
from typing import Any, Final

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.config.policy import Chunks
from epp.picker.server_caches import hash_chain
from epp.request.parse import parse_request
from tests.contract.recordings import read_text
from tests.unit.request.client_shapes import CACHED, CHAT, MESSAGES, RESPONSES, TURNS, sent, text
from tests.unit.request.test_client_cases import billed
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.recording import render

Body = dict[str, Any]
Change = Callable[[Body, random.Random], Any]
Pair = tuple[str, str, Body, Body]
FIELD: Final = {CHAT: ("messages", "chat"), MESSAGES: ("messages", "messages"), RESPONSES: ("input", "items")}
WORD: Final = re.compile(rb"w\d{4}")
BYTES: Final = Chunks(1, 1)
FIELDS: Final = json.loads(read_text("request_fields.json"))


class Author:
    """Writes bodies in which no word occurs twice, so that words show how far two prompts are equal."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self._words = rng, count()

    def text(self, most: int = 6) -> str:
        words = " ".join(f"w{next(self._words):04}" for _ in range(self.rng.randint(1, most)))
        return words + self.rng.choice(("", " Ünï 🦊", "\n", ' "<&>\\'))

    def maybe(self, *items: Any) -> list[Any]:
        return list(items) if self.rng.random() < 0.6 else []

    def body(self, path: str) -> Body:
        turns = [
            turn for number in range(self.rng.randint(1, 3)) for turn in getattr(self, FIELD[path][1])(number)
        ]
        body = {FIELD[path][0]: turns[: self.rng.randint(1, len(turns))]}
        line = self.rng.choice(("", billed(1) + "\n"))
        role = self.rng.choice(("developer", "system"))
        first = {"role": role, "content": (line if (path, role) == (CHAT, "system") else "") + self.text()}
        body[FIELD[path][0]][:0] = self.maybe(first) if path != MESSAGES else ()
        system = self.rng.choice(
            ("", line + self.text(), [*self.maybe(text(billed(1))), text(self.text()), text(self.text())])
        )
        around = {
            CHAT: {"documents": [{"text": self.text()}]},
            MESSAGES: {"system": system},
            RESPONSES: {"instructions": self.rng.choice(("", self.text()))},
        }
        tools = {"tools": [self.tool(path) for _ in range(self.rng.randint(1, 3))]}
        for fields in self.maybe(tools) + self.maybe(around[path]):
            body.update(fields)
        return body

    def tool(self, path: str) -> Body:
        named = {"name": self.text(1).split()[0], "description": self.text()}
        schema = {"type": "object", "properties": {"a": {"description": self.text(), "type": "string"}}}
        if path == MESSAGES:
            return {**named, "input_schema": schema}
        function = {**named, "parameters": schema}
        return {"type": "function", **(function if path == RESPONSES else {"function": function})}

    def chat(self, number: int) -> list[Body]:
        """Return one round of a chat: a question, a loop of tools with thoughts, and an answer."""
        arguments = json.dumps({"a": self.text()})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": arguments}}
        thought = {self.rng.choice(("reasoning", "reasoning_content")): self.text()}
        shown = self.rng.choice(
            (
                {"type": "image_url", "image_url": {"url": self.text()}},
                {"type": "image_url", "image_url": {"url": "data:,a"}, "uuid": self.text()},
                {"image_url": self.text()},
                {"type": "input_audio", "input_audio": {"data": self.text(), "format": "wav"}},
                {"type": "audio_url", "audio_url": {"url": self.text()}},
                {"type": "video_url", "video_url": {"url": self.text()}, "uuid": self.text()},
                {"type": "thinking", "thinking": self.text()},
            )
        )
        return [
            {
                "role": "user",
                "content": self.rng.choice((self.text(), [*self.maybe(shown), text(self.text())])),
            },
            {"role": "assistant", "content": None, "tool_calls": [call], **(self.maybe(thought) or [{}])[0]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": self.text()},
            {"role": "assistant", "content": self.text()},
        ]

    def messages(self, number: int) -> list[Body]:
        thinking = {"type": "thinking", "thinking": self.text(), "signature": "s"}
        use = {"type": "tool_use", "id": f"c{number}", "name": "ls", "input": {"a": self.text()}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": self.text()}
        source = {"type": "base64", "media_type": "image/png", "data": self.text()}
        shown = {"type": "image", "source": self.rng.choice((source, {"type": "url", "url": self.text()}))}
        return [
            {"role": "user", "content": [*self.maybe(shown), text(self.text())]},
            {"role": "assistant", "content": [*self.maybe(thinking), use]},
            {"role": "user", "content": [result, *self.maybe(text(self.text()))]},
            {"role": "assistant", "content": [text(self.text())]},
        ]

    def items(self, number: int) -> list[Body]:
        words = {"type": "reasoning_text", "text": self.text()}
        thought = {"type": "reasoning", "id": f"r{number}", "summary": [], "content": [words]}
        arguments = json.dumps({"a": self.text()})
        call = {"type": "function_call", "call_id": f"c{number}", "name": "ls", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": f"c{number}", "output": self.text()}
        shown = {"type": "input_image", "image_url": self.text(), "detail": "auto"}
        parts = [shown, {"type": "input_text", "text": self.text()}]
        asked = {"role": "user", "content": self.rng.choice((self.text(), parts))}
        return [asked, *self.maybe(thought), call, output]


def objects(value: Any) -> list[Body]:
    """Return all objects inside a value, and the value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        *([value] if isinstance(value, dict) else []),
        *(each for item in inside for each in objects(item)),
    ]


def turns_of(body: Body) -> list[Body]:
    found: list[Body] = body.get("messages") or body["input"]
    return found


# Each changes one thing of a body in place.


def a_text(body: Body, rng: random.Random) -> None:
    written = json.dumps(body)
    at = rng.choice([word.start() for word in WORD.finditer(written.encode())]) + rng.randint(0, 5)
    body.update(json.loads(written[:at] + rng.choice("xü") + written[at:]))


def key_order(body: Body, rng: random.Random) -> None:
    for each in [body, *turns_of(body), *(part for turn in turns_of(body) for part in parts_of(turn))]:
        turned = rng.sample(list(each.items()), len(each))
        each.clear()
        each.update(turned)


def parts_of(turn: Body) -> list[Body]:
    return turn["content"] if isinstance(turn.get("content"), list) else []


def spelled_otherwise(body: Body, rng: random.Random) -> None:
    for turn in turns_of(body):
        if isinstance(turn.get("content"), str) and turn["role"] != "assistant" and rng.random() < 0.5:
            turn["content"] = [{"type": "input_text" if "input" in body else "text", "text": turn["content"]}]
        if thought := turn.pop("reasoning_content", None):
            turn["reasoning"] = thought
        for part in parts_of(turn):
            part.update(CACHED if part.get("type") == "text" and rng.random() < 0.5 else {})


def null_fields(body: Body, rng: random.Random) -> None:
    api = "responses" if "input" in body else "messages" if "system" in body else "chat"
    for key, value in FIELDS[api].items():
        if key not in {"model", "max_tokens", "request_id", "tool_choice"} and rng.random() < 0.7:
            body.setdefault(key, value)
    for turn in turns_of(body) if api == "chat" else ():
        for key in ("refusal", "reasoning", "audio")[: rng.randint(0, 3)]:
            turn.setdefault(key, None)


def tools(change: Callable[[list[Any]], Any]) -> Change:
    return lambda body, _: change(body["tools"]) if len(body.get("tools", ())) > 1 else None


def billing(body: Body, rng: random.Random) -> None:
    line = rng.choice((billed(2) + r"\\n", ""))
    written = re.sub(re.escape(billed(1)) + r"\\n", line, json.dumps(body)).replace(billed(1), billed(2))
    body.update(json.loads(written))


def ids(body: Body, _: random.Random) -> None:
    for each in objects(turns_of(body)):
        each.update({key: each[key] + "z" for key in each if key in ("id", "call_id", "tool_call_id")})


def keys_of_tools(body: Body, _: random.Random) -> None:
    for tool in body.get("tools", ()):
        tool.update({key: tool.pop(key) for key in sorted(tool)}, strict=None)


CHANGES: Final[dict[str, Change]] = {
    "a text": a_text,
    "a turn more": lambda body, _: turns_of(body).append({"role": "user", "content": "more"}),
    "a turn less": lambda body, _: turns_of(body).__delitem__(slice(1, 2)),
    "the end cut": lambda body, rng: turns_of(body).__delitem__(slice(rng.randint(1, 9), None)),
    "a tool more": tools(lambda found: found.insert(1, {**found[-1]})),
    "a tool less": tools(lambda found: found.pop(1)),
    "tools in another order": tools(lambda found: found.reverse()),
    "no tools": lambda body, _: body.pop("tools", None),
    "key order": key_order,
    "spelled otherwise": spelled_otherwise,
    "null fields": null_fields,
    "billing": billing,
    "no instructions": lambda body, _: [body.pop(key, None) for key in ("system", "instructions")],
    "another role": lambda body, _: (
        turns_of(body)[0].get("role") == "system" and turns_of(body)[0].update(role="developer")
    ),
    "escapes": lambda body, rng: None,
    "ids of calls": ids,
    "names of authors": lambda body, _: "messages" in body and turns_of(body)[0].update(name="ann"),
    "keys of tools": keys_of_tools,
}
EARLIER: Final = {"escapes", "ids of calls", "names of authors", "keys of tools"}
"""By design, prompts may part here although vLLM's go on: docs/clients.md, "Not followed"."""


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    differ = (n for n, two in enumerate(zip(one, other, strict=False)) if two[0] != two[1])
    return next(differ, min(len(one), len(other)))


def reached(prompt: bytes, end: int, words: set[bytes]) -> set[bytes]:
    """Return which words of a prompt lie in its first `end` bytes, and an empty word if all of it does."""
    whole = {b""} if end == len(prompt) else set()
    return whole | {each[0] for each in WORD.finditer(prompt, 0, end) if each[0] in words}


def pairs() -> list[Pair]:
    """Return bodies of known clients, two by two, and generated bodies beside what a change made of them."""
    found: list[Pair] = []
    for path in FIELD:
        bodies = [
            body
            for client in TURNS
            for turns in (1, 2)
            for at, body in [sent(client, turns=turns)]
            if at == path
        ]
        found += [("", path, *two) for two in combinations(bodies, 2)]

    @settings(max_examples=600, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.sampled_from(list(FIELD)), st.sampled_from(list(CHANGES)), st.randoms(use_true_random=True))
    def generate(path: str, change: str, rng: random.Random) -> None:
        body = Author(rng).body(path)
        changed = deepcopy(body)
        CHANGES[change](changed, rng)
        for each in (body, changed):
            match each.get("input"):
                case [{"role": "user", "content": str(text)}]:
                    each["input"] = text
        found.append((change, path, body, changed))

    generate()
    return found


@pytest.mark.vllm
def test_prompts_part_where_vllms_do(vllm_environment: VllmEnvironment) -> None:
    """A word that two prompts of vLLM share must be in the chain of both, and no other word."""
    every, parted = pairs(), 0
    rendered = iter(render(vllm_environment, [(path, body) for _, path, *two in every for body in two]))
    for change, path, *two in every:
        theirs = [next(rendered).encode() for _ in two]
        written = [json.dumps({"model": "m", **body}, ensure_ascii=change != "escapes") for body in two]
        written[1] = json.dumps({"model": "m", **two[1]})
        ours = [parse_request(path, body.encode()).prompt for body in written]
        chains = [hash_chain(prompt, seed=0, schedule=BYTES) for prompt in ours]
        ends = shared(*chains), shared(*theirs)
        for mine, true in zip(ours, theirs, strict=True):
            words = {*WORD.findall(mine)} & {*WORD.findall(true)}
            match, kept = reached(mine, ends[0], words), reached(true, ends[1], words)
            assert match <= kept, (change, path, two)  # else a hit is promised that the server does not have
            assert kept <= match or change in EARLIER, (change, path, two)
            parted += 0 < len(kept) < len(words)
    assert parted > 200
