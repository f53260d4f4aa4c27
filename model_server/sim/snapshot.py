"""The values that a scrape of a simulated server would show, in the terms of a metrics page."""

from __future__ import annotations

from dataclasses import dataclass

from model_server.sim.engine import SimEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counters since the process started, and current gauges."""

    taken_s: float
    running: int
    waiting: int
    kv_usage: float
    capacity_tokens: int
    block_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    query_tokens: int
    hit_tokens: int
    finished: int
    ttft_sum_s: float
    ttft_count: int
    prefill_sum_s: float
    """The sums of the `finished` requests, because a server fills its histograms when requests end."""
    prefill_tokens: int
    max_loras: int
    active_adapters: frozenset[str]


def snapshot(engine: SimEngine, *, now: float) -> Snapshot:
    """Return the current page. Prompt tokens are counted when a prefill ends, answer tokens at every step."""
    counters = engine.counters
    return Snapshot(
        taken_s=now,
        running=engine.num_running,
        waiting=engine.num_waiting,
        kv_usage=engine.pool.usage,
        capacity_tokens=engine.shape.capacity_tokens,
        block_tokens=engine.shape.block_tokens,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=engine.generated_tokens(now=now),
        query_tokens=counters.query_tokens,
        hit_tokens=counters.hit_tokens,
        finished=counters.finished,
        ttft_sum_s=counters.ttft_sum_s,
        ttft_count=counters.ttft_count,
        prefill_sum_s=counters.prefill_sum_s,
        prefill_tokens=counters.prefill_tokens,
        max_loras=engine.shape.limits.max_loras,
        active_adapters=engine.active_adapters,
    )
