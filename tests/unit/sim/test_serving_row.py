"""Row 001-6 on the virtual clock: each prompt twice."""

from __future__ import annotations

from bench.model_server.engine.shapes import prompt_lengths
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.runners.cost import CostModel, CostRunner


def serve_twice(*, cache: bool) -> tuple[float, float]:
    """Serve row 001-6 on the cost model. Return the modelled seconds, and the share of prompt tokens hit."""
    runner = CostRunner(CostModel(), max_loras=1, next_token=lambda _: TokenId(7))
    config = EngineConfig(
        num_blocks=4096, block_size_tokens=16, enable_prefix_caching=cache, eos_token_id=NO_TOKEN
    )
    engine = Engine(config, runner)
    prompts = [[TokenId(1000 * n + i) for i in range(size)] for n, size in enumerate(prompt_lengths(20))]
    seconds, served = 0.0, list[Request]()
    for again in range(2):
        for n, prompt in enumerate(prompts):
            served.append(Request(RequestId(f"{again} {n}"), list(prompt), max_tokens=10, arrival_s=0.0))
            engine.add(served[-1])
        while engine.num_unfinished:
            seconds = engine.step(now=seconds)[1]
    hits = sum(request.num_cached_tokens or 0 for request in served)
    return seconds, hits / sum(request.num_prompt_tokens for request in served)


def test_001_6_prompts_sent_twice_hit_49_percent_and_run_1_6_times_as_fast() -> None:
    with_cache, hits = serve_twice(cache=True)
    without, none = serve_twice(cache=False)
    assert round(hits, 2) == 0.49
    assert none == 0
    assert without >= 1.6 * with_cache
