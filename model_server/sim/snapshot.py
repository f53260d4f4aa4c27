"""The values that a scrape of a simulated server would show, in the terms of a metrics page."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model_server.sim.engine import Counters, EngineShape, SimEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    taken_s: float
    shape: EngineShape
    counters: Counters
    running: int
    waiting: int
    kv_usage: float
    active_adapters: frozenset[str]


def snapshot(engine: SimEngine, *, now: float) -> Snapshot:
    """Return the current page. Prompt tokens are counted when a prefill ends, answer tokens at every step."""
    return Snapshot(
        taken_s=now,
        shape=engine.shape,
        counters=replace(engine.counters, generated_tokens=engine.generated_tokens(now=now)),
        running=engine.num_running,
        waiting=engine.num_waiting,
        kv_usage=engine.pool.usage,
        active_adapters=engine.active_adapters,
    )
