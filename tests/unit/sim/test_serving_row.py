"""Rows 001-6 and 001-7 on the virtual clock: each prompt twice, and the effect of a shared beginning on a
server below its capacity and at the document's rate.
"""

from __future__ import annotations

import pytest

from bench.model_server.bench_serving import hit_share, serve, tpot_ms, ttft_s
from bench.model_server.engine.shapes import uneven_lengths
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
    prompts = [[TokenId(1000 * n + i) for i in range(size)] for n, size in enumerate(uneven_lengths(20))]
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


@pytest.mark.slow
@pytest.mark.parametrize("rate_per_s", [4.0, 8.0])
def test_001_7_the_documents_load_hits_37_5_percent_and_is_faster(rate_per_s: float) -> None:
    """The document's rate is 8 a second. The modelled server can carry 4 a second without the cache, and
    not 8.
    """
    shared = serve(rate_per_s=rate_per_s, shared=True, seed=1)
    apart = serve(rate_per_s=rate_per_s, shared=False, seed=1)
    assert all(record.completed for record in (*shared, *apart))
    assert hit_share(shared) == pytest.approx(0.375, abs=0.005)
    assert hit_share(apart) == 0
    assert ttft_s(shared) <= 0.75 * ttft_s(apart)
    assert tpot_ms(shared) < tpot_ms(apart)
