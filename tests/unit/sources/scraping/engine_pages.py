"""Whole metrics pages of servers that are not vLLM or SGLang, as their releases write them: with the metrics
that nobody reads, in their order, with their labels and types.
"""

import re
from typing import Final

LLAMA = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 14120
# HELP llamacpp:prompt_seconds_total Prompt process time
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 21.034
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 5310
# HELP llamacpp:n_decode_total Total number of llama_decode() calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 3207
# HELP llamacpp:n_busy_slots_per_decode Average number of busy slots per llama_decode() call
# TYPE llamacpp:n_busy_slots_per_decode counter
llamacpp:n_busy_slots_per_decode 1.71
# HELP llamacpp:prompt_tokens_seconds Average prompt throughput in tokens/s.
# TYPE llamacpp:prompt_tokens_seconds gauge
llamacpp:prompt_tokens_seconds 671.294
# HELP llamacpp:kv_cache_usage_ratio KV-cache usage. 1 means 100 percent usage.
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio 0.5
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 5
"""
TGI = b"""# TYPE tgi_request_count counter
tgi_request_count 311

# TYPE tgi_batch_inference_count counter
tgi_batch_inference_count{method="prefill"} 290
tgi_batch_inference_count{method="decode"} 41202

# TYPE tgi_queue_size gauge
tgi_queue_size 3

# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 8192

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 7

# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_bucket{le="0.01"} 280
tgi_request_queue_duration_bucket{le="+Inf"} 311
tgi_request_queue_duration_sum 3.75
tgi_request_queue_duration_count 311

"""
_AT = b'WorkerId="%s",application="llm",deployment="LLMServer:m",engine="0",model_name="m",replica="%s"'
RAY = b"""# TYPE ray_serve_num_ongoing_http_requests gauge
ray_serve_num_ongoing_http_requests{NodeId="f1",WorkerId="0a",node_ip_address="10.0.0.7"} 9.0
# TYPE ray_vllm_num_requests_running gauge
ray_vllm_num_requests_running{A} 5.0
ray_vllm_num_requests_running{B} 1.0
# TYPE ray_vllm_num_requests_waiting gauge
ray_vllm_num_requests_waiting{A} 2.0
ray_vllm_num_requests_waiting{B} 0.0
# TYPE ray_vllm_kv_cache_usage_perc gauge
ray_vllm_kv_cache_usage_perc{A} 0.75
ray_vllm_kv_cache_usage_perc{B} 0.25
# TYPE ray_vllm_prompt_tokens_total counter
ray_vllm_prompt_tokens_total{A} 8000.0
ray_vllm_prompt_tokens_total{B} 100.0
# TYPE ray_vllm_time_to_first_token_seconds histogram
ray_vllm_time_to_first_token_seconds_bucket{A,le="+Inf"} 12.0
ray_vllm_time_to_first_token_seconds_count{A} 12.0
ray_vllm_time_to_first_token_seconds_sum{A} 4.5
""".replace(b"{A", b"{" + _AT % (b"0b", b"r1")).replace(b"{B", b"{" + _AT % (b"0c", b"r2"))
TRITON = b"""# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} 311
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 2000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 8000
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
"""
TRTLLM = b"""# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="llama",engine_type="trtllm"} 2.0
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{model_name="llama",engine_type="trtllm"} 1.0
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{model_name="llama",engine_type="trtllm"} 0.5
# TYPE trtllm_kv_cache_max_blocks gauge
trtllm_kv_cache_max_blocks{model_name="llama",engine_type="trtllm"} 1000.0
# TYPE trtllm_kv_cache_tokens_per_block gauge
trtllm_kv_cache_tokens_per_block{model_name="llama",engine_type="trtllm"} 32.0
"""

PAGES: Final[dict[str, tuple[bytes, tuple[float | None, ...]]]] = {
    "llama.cpp": (LLAMA, (2, 5, 0.5, None, None)),
    "TGI": (TGI, (7, 3, None, None, None)),
    "Ray Serve with two replicas": (RAY, (6, 2, 0.5, None, None)),
    "Triton": (TRITON, (4, 3, 0.25, 64, 512_000)),
    "trtllm-serve": (TRTLLM, (2, 1, 0.5, 32, 32_000)),
}
"""Pages with running, waiting, use of the cache, tokens of a block, and tokens of the cache."""


def idle(page: bytes) -> bytes:
    """Return the page with 0 for each number."""
    return re.sub(rb"(?m)^([^#].*) \S+$", rb"\1 0", page)


def untyped(page: bytes) -> bytes:
    return re.sub(rb"(?m)^#.*\n", b"", page)
