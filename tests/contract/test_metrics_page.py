"""The reader of metrics pages against a page that a real vLLM wrote after it had served two adapters.

The full parser of prometheus_client reads the same recording, so the expected numbers are not copied by hand
and stay right when the recording is made anew.
"""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from epp.sources.scraping.metrics_page import parse_page
from tests.contract.recordings import DATA_FOLDER

PAGE = (DATA_FOLDER / "metrics.txt").read_bytes()
SUMS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_prompt_tokens": "vllm:prompt_tokens_cached_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
    "ttft_sum_s": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
}


def samples(name: str) -> list[Sample]:
    families = text_string_to_metric_families(PAGE.decode())
    return [sample for family in families for sample in family.samples if sample.name == name]


@pytest.mark.parametrize("field", SUMS)
def test_every_number_equals_the_number_that_a_full_parser_reads(field: str) -> None:
    series = samples(SUMS[field])
    assert series
    assert getattr(parse_page(PAGE, scraped_at=0.0), field) == pytest.approx(sum(s.value for s in series))


def test_the_cache_is_as_large_as_the_server_says() -> None:
    (config,) = samples("vllm:cache_config_info")
    got = parse_page(PAGE, scraped_at=0.0)
    assert got.block_size == int(config.labels["block_size"])
    assert got.capacity_tokens == int(config.labels["kv_cache_size_tokens"])
    assert got.capacity_tokens == int(config.labels["num_gpu_blocks"]) * int(config.labels["block_size"])


def test_served_requests_show_in_every_counter_of_prefill() -> None:
    served = parse_page(PAGE, scraped_at=0.0)
    assert served.finished
    assert served.prompt_tokens
    assert served.cached_prompt_tokens == served.prefix_hits
    assert served.ttft_count == served.finished


def test_adapters_that_were_active_before_are_not_taken_for_current() -> None:
    series = samples("vllm:lora_requests_info")
    assert {sample.labels["running_lora_adapters"] for sample in series} >= {"alpha", "beta"}, (
        "old series stay"
    )
    newest = max(series, key=lambda sample: sample.value)
    named = {name for name in newest.labels["running_lora_adapters"].split(",") if name}
    got = parse_page(PAGE, scraped_at=0.0)
    assert got.active_adapters == named
    assert got.max_lora == int(newest.labels["max_lora"])
