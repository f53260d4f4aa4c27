"""The reader of metrics pages against pages that a real vLLM wrote.

The full parser of prometheus_client reads the same recordings,
so the expected numbers are not copied by hand and stay right when the recordings are made anew.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from epp.base.types import EndpointMetrics
from epp.sources.scraping.metrics_page import parse_page
from tests.contract.recordings import DATA_FOLDER

PAGES = ("metrics_fresh.txt", "metrics_before_lora.txt", "metrics_after_lora.txt")
"""The pages in the order in which one server wrote them."""

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
    "prefill_sum_s": "vllm:request_prefill_time_seconds_sum",
    "prefill_count": "vllm:request_prefill_time_seconds_count",
}


def read(page: str) -> EndpointMetrics:
    return parse_page((DATA_FOLDER / page).read_bytes(), scraped_at=0.0)


def samples(page: str, name: str) -> list[Sample]:
    families = text_string_to_metric_families((DATA_FOLDER / page).read_text())
    return [sample for family in families for sample in family.samples if sample.name == name]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("field", SUMS)
def test_every_number_equals_the_number_that_a_full_parser_reads(page: str, field: str) -> None:
    series = samples(page, SUMS[field])
    assert series
    assert getattr(read(page), field) == pytest.approx(sum(sample.value for sample in series))


@pytest.mark.parametrize("page", PAGES)
def test_the_cache_is_as_large_as_the_server_says(page: str) -> None:
    (config,) = samples(page, "vllm:cache_config_info")
    got = read(page)
    assert got.block_size == int(config.labels["block_size"])
    assert got.capacity_tokens == int(config.labels["kv_cache_size_tokens"])


def test_served_requests_show_in_every_counter_of_prefill() -> None:
    fresh, served = read("metrics_fresh.txt"), read("metrics_before_lora.txt")
    assert (fresh.finished, fresh.prompt_tokens, fresh.ttft_count) == (0, 0, 0)
    assert served.finished
    assert served.prompt_tokens
    assert served.cached_prompt_tokens == served.prefix_hits
    assert served.ttft_count == served.prefill_count == served.finished
    for before, after in pairwise(map(read, PAGES)):
        assert (after.prompt_tokens or 0) > (before.prompt_tokens or 0)


def test_adapters_of_an_earlier_page_are_not_taken_for_current() -> None:
    series = samples("metrics_after_lora.txt", "vllm:lora_requests_info")
    assert any(sample.labels["running_lora_adapters"] for sample in series), (
        "no adapter was served while recording"
    )
    newest = max(series, key=lambda sample: sample.value)
    named = {name for name in newest.labels["running_lora_adapters"].split(",") if name}
    got = read("metrics_after_lora.txt")
    assert got.active_adapters == named
    assert got.max_lora == int(newest.labels["max_lora"])


def test_before_any_adapter_was_served_the_slots_are_unknown() -> None:
    assert read("metrics_fresh.txt").max_lora is None
