"""Any bytes are read or refused, and the picker reads what a server wrote."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.base.types import EndpointMetrics
from epp.sources.scraping.metrics_page import MetricsError, parse_page
from tests.unit.sources.scraping.metric_pages import EngineState, LoraSeries, vllm_page, without_metadata

counts = st.floats(min_value=0, max_value=1e9, allow_nan=False)
requests = st.integers(0, 10_000)
names = st.text(st.characters(codec="utf-8", exclude_characters=",\x00\r"), min_size=1, max_size=12).filter(
    lambda s: s.strip() == s
)
engines = st.builds(
    EngineState,
    running=requests,
    waiting=requests,
    kv_usage=st.floats(0, 1),
    prompt_tokens=counts,
    cached_tokens=counts,
    generated_tokens=counts,
    queries=counts,
    hits=counts,
    finished=st.dictionaries(st.sampled_from(["stop", "length", "abort", "error"]), counts, min_size=1),
    block_size=st.integers(1, 256),
    blocks=st.integers(1, 10**6),
    cache_tokens=st.none() | st.integers(1, 10**8),
)
positions = st.integers(0, 100_000)  # The page holds the time, so its length differs from run to run.
fragments = st.sampled_from(
    [
        b"# TYPE ",
        b"# HELP ",
        b"vllm:num_requests_running",
        b"vllm:lora_requests_info",
        b"vllm:cache_config_info",
        b"sglang:num_running_reqs",
        b"sglang:cached_tokens_total",
        b'{engine="',
        b'block_size="',
        b'"}',
        b"} ",
        b"\\",
        b'"',
        b" 1.5",
        b" NaN",
        b" -3",
        b" 1e999",
        b" 12345678901234567890",
        b" gauge",
        b"\n",
        b"\n",
        b"\r\n",
        b"\xff",
    ]
)


def believable(metrics: EndpointMetrics) -> bool:
    """Check what routing assumes about any scrape that did not fail."""
    optional = (
        metrics.running,
        metrics.waiting,
        metrics.kv_usage,
        metrics.prompt_tokens,
        metrics.cached_prompt_tokens,
        metrics.generated_tokens,
        metrics.prefix_queries,
        metrics.prefix_hits,
        metrics.finished,
        metrics.ttft_sum_s,
        metrics.ttft_count,
        metrics.prefill_sum_s,
        metrics.prefill_count,
        metrics.capacity_tokens,
        metrics.block_size,
        metrics.max_lora,
    )
    return (metrics.kv_usage is None or metrics.kv_usage <= 1) and all(
        v is None or (math.isfinite(v) and v >= 0) for v in optional
    )


def read(page: bytes) -> EndpointMetrics | None:
    try:
        return parse_page(page, scraped_at=1.0)
    except MetricsError:
        return None


@settings(deadline=None)
@given(st.binary(max_size=400) | st.lists(fragments, max_size=40).map(b"".join))
@example(b"# TYPE vllm:num_requests_running gauge")
@example(b"# TYPE ")
@example(b"vllm:")
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    metrics = read(page)
    assert metrics is None or believable(metrics)


@pytest.mark.slow
@settings(deadline=None)
@given(engines, st.data())
def test_a_damaged_page_is_read_or_refused(engine: EngineState, data: st.DataObject) -> None:
    page = bytearray(vllm_page([engine], loras=[LoraSeries(at=2.0, running="sql")]))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(positions) % len(page)
        page[start : start + data.draw(st.integers(0, 200))] = data.draw(st.binary(max_size=20))
    metrics = read(bytes(page[: data.draw(positions)]))
    assert metrics is None or believable(metrics)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(engines, min_size=1, max_size=3), st.lists(names, max_size=3, unique=True), names)
def test_the_numbers_that_a_server_writes_are_read_back(
    written: list[EngineState], adapters: list[str], model: str
) -> None:
    written = [replace(e, cache_tokens=written[0].cache_tokens) for e in written]
    loras = [LoraSeries(at=1.0, running="stale"), LoraSeries(at=2.0, running=",".join(adapters), max_lora=3)]
    page = vllm_page(written, loras=loras, model=model)
    got = parse_page(page, scraped_at=3.0)
    assert got.running == sum(e.running for e in written)
    assert got.waiting == sum(e.waiting for e in written)
    assert got.kv_usage is not None
    assert math.isclose(got.kv_usage, sum(e.kv_usage for e in written) / len(written), abs_tol=1e-12)
    assert got.capacity_tokens == sum(e.cache_tokens or e.blocks * e.block_size for e in written)
    for seen, wrote in (
        (got.prompt_tokens, [e.prompt_tokens for e in written]),
        (got.cached_prompt_tokens, [e.cached_tokens for e in written]),
        (got.generated_tokens, [e.generated_tokens for e in written]),
        (got.prefix_queries, [e.queries for e in written]),
        (got.prefix_hits, [e.hits for e in written]),
        (got.finished, [v for e in written for v in e.finished.values()]),
    ):
        assert seen is not None
        assert math.isclose(seen, math.fsum(wrote))
    assert got.active_adapters == set(adapters)
    assert parse_page(without_metadata(page), scraped_at=3.0) == got
