"""Metrics of the store below the cache, under the names of vLLM's own offloading. Caller: `metrics`.

`vllm:external_prefix_cache_*` counts tokens that the engine's blocks did not have.
`vllm:kv_offload_tiering_*` counts moved data by tier: GPU is the model's device, CPU is main memory, STORAGE
is the folder. `kv_store:*` has no counterpart in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model_server.core.engine import Engine
from model_server.tiers.status import StoreStatus

_LABELS = ("engine", "model_name")
_TIERS = ("GPU", "CPU", "STORAGE")
_Kind = type[GaugeMetricFamily | CounterMetricFamily]
_Sample = tuple[tuple[str, ...], float]


class StoreMetrics:
    """Reads the engine and the store while a page is made."""

    def __init__(self, engine: Engine, status: Callable[[], StoreStatus], values: tuple[str, str]) -> None:
        self._engine = engine
        self._status = status
        self._values = values

    def collect(self) -> Iterator[Metric]:
        stats, now = self._engine.kv_cache.stats, self._status()
        for name, text, value in (
            ("vllm:external_prefix_cache_queries", "Tokens that were looked up in the store, because the blocks did not have them", stats.external_queries_tokens),
            ("vllm:external_prefix_cache_hits", "Tokens that were found in the store", stats.external_hits_tokens),
            ("vllm:kv_offload_tiering_promotion_job_failures", "Loads that failed; the prefix was computed", now.load_failures),
            ("vllm:kv_offload_tiering_cascade_job_failures", "Writes that failed; the prefix is not stored", now.write_failures),
            ("vllm:kv_offload_tiering_backpressure_blocks_dropped", "Blocks that were not stored", now.dropped_blocks),
            ("kv_store:reordered_nodes", "Nodes whose important tokens were packed together", now.reordered_nodes),
            ("kv_store:stored_blocks", "Blocks that were stored", now.stored_blocks),
        ):  # fmt: skip
            yield self._family(CounterMetricFamily, name, text, (), [((), value)])
        for name, text, value in (
            ("kv_store:usage_bytes", "Bytes in the folder of the store", now.used_bytes),
            ("kv_store:capacity_bytes", "The most bytes that the folder may hold", now.capacity_bytes),
            ("kv_store:waiting_bytes", "Bytes that wait to be written", now.waiting_bytes),
            (
                "kv_store:usable",
                "1 if the store uses its disk, 0 for a while after the disk has failed",
                int(now.usable),
            ),
        ):
            yield self._family(GaugeMetricFamily, name, text, (), [((), value)])
        yield from self._by_tier(now)
        loads: list[_Sample] = [
            (("exact",), now.exact_loads),
            (("selective",), now.selective_loads),
        ]
        about = "Prefixes that were loaded (exact or selective)"
        yield self._family(CounterMetricFamily, "kv_store:loads", about, ("mode",), loads)

    def _by_tier(self, now: StoreStatus) -> Iterator[Metric]:
        for kind, name, text, values in (
            (CounterMetricFamily, "vllm:kv_offload_tiering_chunk_hits", "Chunks that requests needed, by the tier where they were found", now.found_chunks),
            (CounterMetricFamily, "vllm:kv_offload_tiering_read_bytes", "Bytes read from disk", (now.read_bytes,)),
            (CounterMetricFamily, "vllm:kv_offload_tiering_write_bytes", "Bytes written to disk", (now.written_bytes,)),
            (GaugeMetricFamily, "kv_store:resident_bytes", "Bytes of the chunks that a fast tier holds", now.tier_bytes),
        ):  # fmt: skip
            tiers = _TIERS[-1:] if len(values) == 1 else _TIERS[: len(values)]
            samples: list[_Sample] = [((tier,), value) for tier, value in zip(tiers, values, strict=True)]
            yield self._family(kind, name, text, ("tier",), samples)

    def _family(
        self, kind: _Kind, name: str, text: str, labels: tuple[str, ...], samples: list[_Sample]
    ) -> Metric:
        family: Any = kind(name, text, labels=(*_LABELS, *labels))
        for own, value in samples:
            family.add_metric((*self._values, *own), value)
        metric: Metric = family
        return metric
