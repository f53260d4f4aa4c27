"""Lists the names of the metrics that routing needs, as several servers spell them: vLLM (old and new
spellings, and the prefix of Ray Serve), llm-d-inference-sim (with vLLM's names), SGLang, TensorRT-LLM, by
itself (`trtllm-serve`) and in Triton, llama.cpp, and TGI.
"""

import re
from typing import Final

_SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    # The first spelling on the page counts: a release that renames a metric writes both for a while.
    # Triton's gauges of one family differ in a label, which stands in braces here.
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "trtllm_num_requests_running",
        "nv_trt_llm_request_metrics{request_type=scheduled}",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
    ),
    "waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "trtllm_num_requests_waiting",
        "nv_trt_llm_request_metrics{request_type=waiting}",
        "llamacpp:requests_deferred",
        "tgi_queue_size",
    ),
    # SGLang with separate prefill and decode: requests wait in these queues too.
    "queued_to_prefill": (
        "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_prealloc_queue_reqs",
    ),
    "queued_to_send": ("sglang:num_prefill_inflight_queue_reqs",),
    "queued_to_decode": ("sglang:num_decode_prealloc_queue_reqs",),
    "queued_to_receive": ("sglang:num_decode_transfer_queue_reqs",),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "trtllm_kv_cache_utilization",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "cache_config": ("vllm:cache_config_info", "sglang:cache_config_info"),
    "pool_tokens": ("sglang:max_total_num_tokens",),
    "pool_blocks": (
        "trtllm_kv_cache_max_blocks",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
    ),
    "page_size": (
        "sglang:page_size",
        "trtllm_kv_cache_tokens_per_block",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "cached_prompt_tokens": ("vllm:prompt_tokens_cached_total", "sglang:cached_tokens_total"),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "finished": ("vllm:request_success_total", "sglang:num_requests_total"),
    "ttft_sum": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "ttft_count": ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "lora": ("vllm:lora_requests_info",),
    "lora_loaded": ("vllm:lora_adapter_loaded",),
    "lora_loaded_count": ("vllm:num_gpu_loaded_lora_adapters",),
    "awake": ("vllm:engine_sleep_state{sleep_state=awake}",),
    "lora_slots": ("vllm:max_gpu_lora_adapters", "sglang:lora_pool_slots_total"),
}
NAMES: Final = {
    # Ray Serve exports vLLM's metrics with its own prefix, and no colon.
    field: names + tuple(name.replace("vllm:", "ray_vllm_") for name in names if name.startswith("vllm:"))
    for field, names in _SPELLINGS.items()
}


KNOWN: Final = frozenset(name.partition("{")[0].encode() for names in NAMES.values() for name in names)
FAMILIES: Final = KNOWN | {re.sub(rb"_(total|sum|count)$", b"", name) for name in KNOWN}
NAMESPACES: Final = (b"vllm:", b"ray_vllm_", b"sglang:", b"trtllm_", b"nv_trt_llm_", b"llamacpp:", b"tgi_")
assert all(name.startswith(NAMESPACES) for name in KNOWN), "a known name has no namespace"
