"""Whatever clients, servers and sockets send, the thread of exact mode goes on and its data stay right."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.errors import BadRequestError
from epp.base.types import EndpointName
from epp.config.policy import Chunks
from epp.picker.server_caches import hash_chain
from epp.request.parse import parse_request
from epp.sources.kvevents.decoding import BlockHasher
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.language import FolderLanguage
from epp.sources.kvevents.routed_prompts import RoutedPrompt
from epp.sources.kvevents.sequence import Forget, Step
from tests.fuzz.mutating import mutants
from tests.fuzz.trees import as_msgpack, tree_mutants
from tests.invariants.kvevents import check_exact
from tests.unit.sources.kvevents.a_language import write_language

SERVERS = (EndpointName("a"), EndpointName("b"))
SCHEDULE = Chunks(size_bytes=32, later_size_bytes=64, later_from_bytes=256)
BLOCK = 4
TEMPLATE = (
    "{{ bos_token }}{% if think %}think{% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
)

WORDS = st.sampled_from(
    [
        "",
        "a",
        " hello ",
        "漢字" * 20,
        "x" * 300,
        "\ud800",
        "é\n\n",
        "<|user|>",
        "the quick fox " * 30,
        "\x00",
        "[1",
    ]
)
KEYS = st.sampled_from(
    [
        "type",
        "text",
        "name",
        "function",
        "arguments",
        "parameters",
        "id",
        "role",
        "content",
        "messages",
        "think",
    ]
)
VALUES = st.recursive(
    WORDS | st.sampled_from([None, True, 0, -1, 1.5, 10**30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
PARTS = VALUES | WORDS.map(lambda text: {"type": "text", "text": text})
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool", "", "odd"]),
        "content": WORDS | st.lists(PARTS, max_size=3),
    },
    optional={
        "name": WORDS,
        "tool_call_id": WORDS,
        "tool_calls": VALUES
        | st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": WORDS, "arguments": VALUES})})
        ),
    },
)
SHAPING = {
    "tools": VALUES,
    "chat_template": VALUES,
    "chat_template_kwargs": VALUES | st.just({"think": True}),
    "documents": VALUES | st.just([{"text": "one"}]),
    "reasoning_effort": VALUES,
    "add_special_tokens": VALUES,
    "truncate_prompt_tokens": VALUES,
    "cache_salt": WORDS,
}
BODIES = st.one_of(
    st.tuples(
        st.sampled_from(["/v1/chat/completions", "/v1/messages"]),
        st.fixed_dictionaries({"messages": st.lists(MESSAGES, min_size=1, max_size=4)}, optional=SHAPING),
    ),
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": WORDS | st.lists(st.integers(0, 2**32 - 1), max_size=99) | VALUES}, optional=SHAPING
        ),
    ),
)


@pytest.fixture(scope="module")
def templated_language(tmp_path_factory: pytest.TempPathFactory) -> FolderLanguage:
    return FolderLanguage(write_language(Path(tmp_path_factory.mktemp("model")), template=TEMPLATE))


def routed_or_refused(path: str, raw: bytes, *, server: EndpointName) -> RoutedPrompt | None:
    """Return None if the picker would have refused the prompt or if it has no whole chunk."""
    try:
        inference = parse_request(path, raw)
    except BadRequestError:
        return None
    chain = hash_chain(inference.prompt, seed=1, schedule=SCHEDULE)
    if not chain:
        return None
    return RoutedPrompt(
        server=server,
        adapter="",
        inference=inference,
        chain=chain,
        schedule=SCHEDULE,
    )


def stored(tokens: list[int], **fields: Any) -> dict[str, Any]:
    names = BlockHasher("sha256").names(tokens, block_tokens=BLOCK)
    event = {"type": "BlockStored", "block_hashes": names, "token_ids": tokens, "block_size": BLOCK}
    return {**event, "parent_block_hash": None, "medium": "GPU", **fields}


GOOD = list(range(BLOCK))
BATCHES: list[object] = [
    [0.0, [stored(GOOD), stored(GOOD * 3, medium="CPU", kv_cache_spec_kind="sliding_window")], 0],
    [0.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}, {"type": "AllBlocksCleared"}], 0],
    [0.0, [["BlockStored", [3], 1, GOOD, BLOCK, None, "CPU"]], None],
]


@pytest.mark.slow
@given(prompts=st.lists(BODIES, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_no_prompt_and_no_message_of_a_server_ends_the_thread(
    templated_language: FolderLanguage, prompts: list[tuple[str, dict[str, Any]]], seed: int
) -> None:
    rng = random.Random(seed)
    exact = Exact({"": ModelSettings(language=templated_language)}, max_blocks=60, max_chunks=30)
    for name in SERVERS:
        exact.add(name, model="")
    exact.apply(SERVERS[0], [as_msgpack([0.0, [stored(GOOD)], 0])], complete=True, now=0.0)
    batches = tree_mutants(rng, BATCHES, as_msgpack)
    errors = 0
    for now, (path, body) in enumerate(prompts, 1):
        raw = json.dumps({"model": "m", **body}).encode()
        sent = mutants(rng, [raw])() if rng.random() < 0.2 else raw
        prompt = routed_or_refused(path, sent, server=rng.choice(SERVERS))
        if prompt is not None:
            exact.routed(prompt, now=float(now))
        payload = batches() or b""
        spoiled = mutants(rng, [payload or b"x"])() if rng.random() < 0.3 else payload
        step: Step = Forget.GAP if rng.random() < 0.1 else spoiled
        exact.apply(rng.choice(SERVERS), [step], complete=rng.random() < 0.8, now=float(now))
        exact.findings(now=now * 40.0)
        check_exact(exact)
        errors = exact.models()[""].prompts.get("error", 0)
    assert not errors, exact.last_error
