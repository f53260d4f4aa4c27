"""The facts about a real vLLM on which the picker relies: which requests share cached tokens, and which
counters report the cached tokens. The caches live as long as the run, so each test sends its own text.
"""

from __future__ import annotations

import pytest

from tests.vllm_env.prompts import prose
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME, VllmServer

pytest_plugins = ["tests.vllm_env.fixtures"]
# The first test waits for the servers to start.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HITS = "vllm:prefix_cache_hits_total"
QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_WORDS = 1800


def tokenize(server: VllmServer, text: str) -> list[int]:
    tokens = server.post("/tokenize", {"model": MODEL_NAME, "prompt": text}).json()["tokens"]
    assert isinstance(tokens, list)
    return tokens


def complete(server: VllmServer, prompt: str, *, model: str = MODEL_NAME, **fields: object) -> int:
    """Send one completion. Return its cached prompt tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    usage = answer.json()["usage"]
    assert isinstance(usage, dict)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


def full_blocks(tokens: int) -> int:
    """Return the part of `tokens` that fills whole blocks. vLLM always computes at least the prompt's last
    token.
    """
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def shared_tokens(first: list[int], second: list[int]) -> int:
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def test_a_repeated_prefix_raises_the_hit_counter_of_its_server_by_the_whole_blocks_shared(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    server, other = vllm_servers
    prefix = prose("repeated prefix", words=PREFIX_WORDS)
    questions = [prefix + prose(f"question {n}", words=20) for n in range(10)]
    tokens = [tokenize(server, question) for question in questions]
    expected = [full_blocks(shared_tokens(tokens[0], later)) for later in tokens[1:]]
    assert min(expected) > 1900
    hits, queries, hits_elsewhere = server.counter(HITS), server.counter(QUERIES), other.counter(HITS)

    assert complete(server, questions[0]) == 0
    assert [complete(server, question) for question in questions[1:]] == expected

    assert server.counter(HITS) - hits == sum(expected)
    assert server.counter(QUERIES) - queries == sum(map(len, tokens))
    assert other.counter(HITS) == hits_elsewhere


def test_an_equal_prompt_leaves_only_its_last_block_to_compute(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    server = vllm_servers[0]
    prompt = prose("equal prompt", words=PREFIX_WORDS)
    tokens = len(tokenize(server, prompt))
    assert complete(server, prompt) == 0
    assert complete(server, prompt) == full_blocks(tokens - 1)


def test_the_other_server_has_none_of_the_blocks_that_the_first_cached(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    first, second = vllm_servers
    prompt = prose("sent to both", words=300)
    assert complete(first, prompt) == 0
    assert complete(second, prompt) == 0
    assert complete(second, prompt) > 0


def test_adapters_share_no_prefix_with_each_other_or_with_the_base_model(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    server = vllm_servers[1]
    prompt = prose("adapters", words=PREFIX_WORDS)
    tokens = len(tokenize(server, prompt))
    for model in ("alpha", "beta", MODEL_NAME):
        assert complete(server, prompt, model=model) == 0
    for model in ("alpha", "beta", MODEL_NAME):
        assert complete(server, prompt, model=model) == full_blocks(tokens - 1)


def test_a_cache_salt_hides_a_prefix_from_every_other_salt(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    server = vllm_servers[1]
    prompt = prose("salted", words=PREFIX_WORDS)
    tokens = len(tokenize(server, prompt))
    assert complete(server, prompt, cache_salt="tenant-1") == 0
    assert complete(server, prompt, cache_salt="tenant-2") == 0
    assert complete(server, prompt) == 0
    assert complete(server, prompt, cache_salt="tenant-1") == full_blocks(tokens - 1)


def test_a_killed_server_refuses_connections_and_comes_back_with_an_empty_cache(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    server = vllm_servers[1]
    prompt = prose("before the crash", words=PREFIX_WORDS)
    assert complete(server, prompt) == 0
    assert complete(server, prompt) > 0
    server.kill()
    with pytest.raises(ConnectionRefusedError):
        server.get("/health")
    server.start()
    server.wait_ready()
    assert complete(server, prompt) == 0
