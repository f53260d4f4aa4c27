"""Metrics of the store below the cache, under the names of vLLM's own offloading. Caller: `metrics`.

`vllm:external_prefix_cache_*` counts tokens that the engine's blocks did not have.
`vllm:kv_offload_tiering_*` counts moved data by tier: GPU is the model's device, CPU is main memory, STORAGE
is the folder. `kv_store:*` has no counterpart in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model_server.core.engine import Engine
from model_server.tiers.status import StoreStatus

_LABELS = ("engine", "model_name")
_TIERS = ("GPU", "CPU", "STORAGE")


class StoreMetrics:
    """Reads the engine and the store while a page is made."""

    def __init__(self, engine: Engine, status: Callable[[], StoreStatus], values: tuple[str, str]) -> None:
        self._engine = engine
        self._status = status
        self._values = values

    def collect(self) -> Iterator[Metric]:
        stats, now = self._engine.kv_cache.stats, self._status()
        for name, text, label, values in (
            ("vllm:external_prefix_cache_queries", "Tokens that were looked up in the store, because the blocks did not have them", "", {"": stats.external_queries_tokens}),
            ("vllm:external_prefix_cache_hits", "Tokens that were found in the store", "", {"": stats.external_hits_tokens}),
            ("vllm:kv_offload_tiering_promotion_job_failures", "Loads that failed; the prefix was computed", "", {"": now.load_failures}),
            ("vllm:kv_offload_tiering_cascade_job_failures", "Writes that failed; the prefix is not stored", "", {"": now.write_failures}),
            ("vllm:kv_offload_tiering_backpressure_blocks_dropped", "Blocks that were not stored", "", {"": now.dropped_blocks}),
            ("vllm:kv_offload_tiering_chunk_hits", "Chunks that requests needed, by the tier where they were found", "tier", dict(zip(_TIERS, now.found_chunks, strict=True))),
            ("vllm:kv_offload_tiering_read_bytes", "Bytes read from disk", "tier", {_TIERS[-1]: now.read_bytes}),
            ("vllm:kv_offload_tiering_write_bytes", "Bytes written to disk", "tier", {_TIERS[-1]: now.written_bytes}),
            ("kv_store:loads", "Prefixes that were loaded (exact or selective)", "mode", {"exact": now.exact_loads, "selective": now.selective_loads}),
            ("kv_store:reordered_nodes", "Nodes whose important tokens were packed together", "", {"": now.reordered_nodes}),
        ):  # fmt: skip
            yield self._family(CounterMetricFamily, name, text, label, values)
        used = "Bytes in the folder of the store"
        yield self._family(GaugeMetricFamily, "kv_store:usage_bytes", used, "", {"": now.used_bytes})
        usable = "1 if the store uses its disk, 0 for a while after the disk has failed"
        yield self._family(GaugeMetricFamily, "kv_store:usable", usable, "", {"": now.usable})

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """Return a metric with a value for each value of `label`, or with one value if there is no label."""
        family: Any = kind(name, text, labels=(*_LABELS, label) if label else _LABELS)
        for own, value in values.items():
            family.add_metric((*self._values, own) if label else self._values, value)
        metric: Metric = family
        return metric
