"""Metrics pages as model servers write them, made by the Prometheus client that those servers use.

The reader under test never sees this library, so the two can only agree by agreeing on the format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_BUCKETS = tuple(round(0.001 * 1.6**n, 6) for n in range(24))
_OTHER_HISTOGRAMS = (
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_decode_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    "nixl_xfer_time_seconds",
    "nixl_post_time_seconds",
    "nixl_bytes_transferred",
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """The numbers that one engine of a server reports."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    queries: float = 0.0
    hits: float = 0.0
    finished: dict[str, float] = field(default_factory=dict)
    """Requests by finish reason."""
    ttft_s: tuple[float, ...] = ()
    block_size: int = 16
    blocks: int = 1000
    cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LoraSeries:
    """One series of vllm:lora_requests_info. The newest series is the current one."""

    at: float
    running: str = ""
    waiting: str = ""
    max_lora: int = 4


def vllm_page(
    engines: Sequence[EngineState] = (EngineState(),),
    *,
    loras: Sequence[LoraSeries] = (),
    model: str = MODEL,
) -> bytes:
    """Return a page of vLLM. With one engine it has about 70 KB, as a real page."""
    registry = CollectorRegistry()
    labels = ["engine", "model_name"]

    def gauge(name: str, extra: Sequence[str] = ()) -> Gauge:
        return Gauge(f"vllm:{name}", "Help of a gauge.", [*labels, *extra], registry=registry)

    def counter(name: str, extra: Sequence[str] = ()) -> Counter:
        return Counter(f"vllm:{name}", "Help of a counter.", [*labels, *extra], registry=registry)

    def histogram(name: str) -> Histogram:
        return Histogram(f"vllm:{name}", "Help of a histogram.", labels, registry=registry, buckets=_BUCKETS)

    running, waiting = gauge("num_requests_running"), gauge("num_requests_waiting")
    by_reason = gauge("num_requests_waiting_by_reason", ["reason"])
    usage = gauge("kv_cache_usage_perc")
    queries, hits = counter("prefix_cache_queries"), counter("prefix_cache_hits")
    prompt, cached = counter("prompt_tokens"), counter("prompt_tokens_cached")
    generated, success = counter("generation_tokens"), counter("request_success", ["finished_reason"])
    ttft = histogram("time_to_first_token_seconds")
    others = [histogram(name) for name in _OTHER_HISTOGRAMS]
    cache_names = ["block_size", "engine", "num_gpu_blocks", "prefix_caching_hash_algo"]
    if any(e.cache_tokens is not None for e in engines):
        cache_names.append("kv_cache_size_tokens")
    cache = Gauge("vllm:cache_config_info", "Help of the cache.", cache_names, registry=registry)
    for number, state in enumerate(engines):
        names = (str(number), model)
        running.labels(*names).set(state.running)
        waiting.labels(*names).set(state.waiting)
        by_reason.labels(*names, "capacity").set(state.waiting + 7)
        usage.labels(*names).set(state.kv_usage)
        for metric, amount in (
            (queries, state.queries),
            (hits, state.hits),
            (prompt, state.prompt_tokens),
            (cached, state.cached_tokens),
            (generated, state.generated_tokens),
        ):
            metric.labels(*names).inc(amount)
        for reason, amount in state.finished.items():
            success.labels(*names, reason).inc(amount)
        for seconds in state.ttft_s:
            ttft.labels(*names).observe(seconds)
        for other in others:
            other.labels(*names).observe(0.5)
        extra = {} if state.cache_tokens is None else {"kv_cache_size_tokens": str(state.cache_tokens)}
        cache.labels(
            block_size=str(state.block_size),
            engine=str(number),
            num_gpu_blocks=str(state.blocks),
            prefix_caching_hash_algo="sha256",
            **extra,
        ).set(1)
    if loras:
        lora_labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = Gauge("vllm:lora_requests_info", "Help of LoRA.", lora_labels, registry=registry)
        for series in loras:
            info.labels(str(series.max_lora), series.running, series.waiting).set(series.at)
    return generate_latest(registry)


def without_metadata(page: bytes) -> bytes:
    """The same samples with no HELP and TYPE lines, as some proxies pass them on."""
    return b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(b"#"))
