"""Prometheus metrics under vLLM's names and labels, in a separate registry.

Gauges and cache counters are read from the engine at each scrape. The other metrics are counted when steps
finish. There is one intended difference: vLLM keeps all label sets of `lora_requests_info` forever, and
this server keeps only the last few. As in vLLM the value of a label set is a Unix time, and the
label set with the newest time is valid. There is no sample before the first request for an adapter.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model_server.core.engine import Engine, TokenOutput
from model_server.core.request import FinishReason, Request
from model_server.core.scheduler import Scheduler, StepPlan
from model_server.tiers.status import StoreStatus

_COUNT, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_LABELS = ("engine", "model_name")
_ENGINE = "0"
_KEPT_LORA_SETS = 8
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_LATENCY_S[3:])
_TOKEN_GAP_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Metrics:
    def __init__(self, *, model_name: str, max_loras: int, wall_clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._values = (_ENGINE, model_name)
        self._wall_clock = wall_clock
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens whose prefill has finished")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._preemptions = self._counter("num_preemptions", "Requests sent back for lack of blocks")
        self._ended = self._by_finish_reason()
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token", _TTFT_S)
        self._gap = self._histogram("inter_token_latency_seconds", "Time between two tokens", _TOKEN_GAP_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time to the last token", _LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission", _TTFT_S)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from admission to the first token", _TTFT_S
        )
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token", _LATENCY_S)
        self._computed_size = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that were computed, without the tokens found in the cache",
            _TOKENS,
        )
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_size = self._histogram(
            "request_generation_tokens", "Answer tokens of a request", _TOKENS
        )
        self._adapters_asked_for = False
        self._lora = _LoraInfo(max_loras)
        self.registry.register(self._lora)

    def _by_finish_reason(self) -> dict[FinishReason, Counter]:
        labels = (*_LABELS, "finished_reason")
        ended = Counter("vllm:request_success", "Requests that ended", labels, registry=self.registry)
        return {reason: ended.labels(*self._values, reason.value) for reason in FinishReason}

    def watch(self, engine: Engine, store: Callable[[], StoreStatus] | None = None) -> None:
        """Read this engine, and the store below its cache, at each scrape."""
        config = engine.config
        info = {
            "engine": _ENGINE,
            "block_size": str(config.block_size_tokens),
            "num_gpu_blocks": str(config.num_blocks),
            "kv_cache_size_tokens": str(config.capacity_tokens),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "prefix_caching_hash_algo": config.cache.hash_algorithm,
            "cache_dtype": "none",
        }
        Gauge(
            "vllm:cache_config_info", "Settings of the KV cache", tuple(info), registry=self.registry
        ).labels(**info).set(1)
        self.registry.register(_Read(engine, self._values, store))

    def step_began(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._preemptions.inc(len(plan.preempted))
        self.lora_activity(scheduler)

    def step_finished(self, outputs: Sequence[TokenOutput], scheduler: Scheduler, *, now: float) -> None:
        self._generated.inc(len(outputs))
        for output in outputs:
            request = output.request
            if output.previous_token_s is not None:
                self._gap.observe(now - output.previous_token_s)
            else:
                self._ttft.observe(now - request.arrival_s)
                self._prompt_tokens.inc(request.num_prompt_tokens)
                self._cached_tokens.inc(request.num_cached_tokens or 0)
            if request.finish_reason is not None:
                self._request_ended(request, request.finish_reason)
        self.lora_activity(scheduler)

    def adapter_requested(self) -> None:
        """Note that a request for an adapter has come. From now on adapters are watched."""
        self._adapters_asked_for = True

    def request_aborted(self) -> None:
        self._ended[FinishReason.ABORT].inc()

    def lora_activity(self, scheduler: Scheduler) -> None:
        """Record which adapters have requests now, if this has changed."""
        if not self._adapters_asked_for:
            return
        running = ",".join(sorted({r.adapter.name for r in scheduler.running if r.adapter}))
        waiting = ",".join(sorted({r.adapter.name for r in scheduler.waiting if r.adapter}))
        self._lora.note(running, waiting, now=self._wall_clock)

    def _request_ended(self, request: Request, reason: FinishReason) -> None:
        scheduled, first, last = request.scheduled_s, request.first_token_s, request.last_token_s
        assert scheduled is not None, "a request ended by a token has been admitted"
        assert first is not None, "a request ended by a token has had a first token"
        assert last is not None, "a request ended by a token has had a last token"
        self._ended[reason].inc()
        self._queue.observe(scheduled - request.arrival_s)
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._e2e.observe(last - request.arrival_s)
        self._computed_size.observe(request.num_prompt_tokens - (request.num_cached_tokens or 0))
        self._prompt_size.observe(request.num_prompt_tokens)
        self._answer_size.observe(request.num_output_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
        return metric.labels(*self._values)


Row = tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str, Mapping[str, float]]
"""The kind of a metric, its name, its text, its own label, and its value for each value of this label."""


class _Read:
    """Reads the engine, and the store below its cache if there is one, while a page is made."""

    def __init__(
        self, engine: Engine, values: tuple[str, str], store: Callable[[], StoreStatus] | None
    ) -> None:
        self._engine = engine
        self._values = values
        self._store = store

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, label, values in (*self._of_engine(), *self._of_store()):
            family: Any = kind(name, text, labels=(*_LABELS, label) if label else _LABELS)
            for own, value in values.items():
                family.add_metric((*self._values, own) if label else self._values, value)
            yield family

    def _of_engine(self) -> Sequence[Row]:
        scheduler, cache = self._engine.scheduler, self._engine.kv_cache
        return (
            (_GAUGE, "vllm:num_requests_running", "Requests in the batch", "", {"": len(scheduler.running)}),
            (_GAUGE, "vllm:num_requests_waiting", "Requests queued", "", {"": len(scheduler.waiting)}),
            (_GAUGE, "vllm:kv_cache_usage_perc", "Share of the blocks that requests hold, 0 to 1", "", {"": cache.usage}),
            (_COUNT, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", "", {"": cache.stats.queries_tokens}),
            (_COUNT, "vllm:prefix_cache_hits", "Tokens found in the prefix cache", "", {"": cache.stats.hits_tokens}),
        )  # fmt: skip

    def _of_store(self) -> Sequence[Row]:
        """Return vLLM's names for its own offloading. GPU is the model's device, CPU main memory, STORAGE the
        folder. `kv_store:*` has no counterpart in vLLM.
        """
        if self._store is None:
            return ()
        stats, now = self._engine.kv_cache.stats, self._store()
        tiering = "vllm:kv_offload_tiering"
        return (
            (_COUNT, "vllm:external_prefix_cache_queries", "Tokens that were looked up in the store, because the blocks did not have them", "", {"": stats.external_queries_tokens}),
            (_COUNT, "vllm:external_prefix_cache_hits", "Tokens that were found in the store", "", {"": stats.external_hits_tokens}),
            (_COUNT, f"{tiering}_promotion_job_failures", "Loads that failed; the prefix was computed", "", {"": now.load_failures}),
            (_COUNT, f"{tiering}_cascade_job_failures", "Writes that failed; the prefix is not stored", "", {"": now.write_failures}),
            (_COUNT, f"{tiering}_backpressure_blocks_dropped", "Blocks that were not stored", "", {"": now.dropped_blocks}),
            (_COUNT, f"{tiering}_chunk_hits", "Chunks that requests needed, by the tier where they were found", "tier", dict(zip(("GPU", "CPU", "STORAGE"), now.found_chunks, strict=True))),
            (_COUNT, f"{tiering}_read_bytes", "Bytes read from disk", "tier", {"STORAGE": now.read_bytes}),
            (_COUNT, f"{tiering}_write_bytes", "Bytes written to disk", "tier", {"STORAGE": now.written_bytes}),
            (_COUNT, "kv_store:loads", "Prefixes that were loaded (exact or selective)", "mode", {"exact": now.exact_loads, "selective": now.selective_loads}),
            (_COUNT, "kv_store:reordered_nodes", "Nodes whose important tokens were packed together", "", {"": now.reordered_nodes}),
            (_GAUGE, "kv_store:usage_bytes", "Bytes in the folder of the store", "", {"": now.used_bytes}),
            (_GAUGE, "kv_store:usable", "1 if the store uses its disk, 0 for a while after the disk has failed", "", {"": now.usable}),
        )  # fmt: skip


class _LoraInfo:
    def __init__(self, max_loras: int) -> None:
        self._max_loras = str(max_loras)
        self._current = ("", "")
        self._sets: OrderedDict[tuple[str, str], float] = OrderedDict()

    def note(self, running: str, waiting: str, *, now: Callable[[], float]) -> None:
        if (running, waiting) == self._current:
            return
        self._current = (running, waiting)
        self._sets[self._current] = now()
        self._sets.move_to_end(self._current)
        while len(self._sets) > _KEPT_LORA_SETS:
            self._sets.popitem(last=False)

    def collect(self) -> Iterator[Metric]:
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that have requests; the value is the Unix time of the last change",
            labels=labels,
        )
        for (running, waiting), at in self._sets.items():
            family.add_metric((self._max_loras, running, waiting), at)
        yield family
