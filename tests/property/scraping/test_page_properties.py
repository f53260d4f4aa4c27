"""Any bytes are read or refused, and the picker reads what a server wrote."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
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


def read(page: bytes) -> EndpointMetrics | None:
    try:
        return parse_page(page, scraped_at=1.0)
    except MetricsError:
        return None


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
