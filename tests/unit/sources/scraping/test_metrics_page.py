"""What is read from a metrics page, and which pages are not believed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from epp.base.types import EndpointMetrics
from epp.sources.scraping.metrics_page import MetricsError, PageReader, parse_page
from tests.unit.sources.scraping.engine_pages import PAGES, untyped
from tests.unit.sources.scraping.metric_pages import (
    MODEL,
    EngineState,
    LoraSeries,
    vllm_page,
    without_metadata,
)

BUSY = EngineState(
    running=3,
    waiting=2,
    kv_usage=0.25,
    prompt_tokens=1000,
    cached_tokens=400,
    generated_tokens=77,
    queries=1200,
    hits=500,
    finished={"stop": 5, "length": 2, "abort": 1},
    ttft_s=(0.5, 1.5),
)

SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 161721.0
# TYPE sglang:page_size gauge
sglang:page_size{model_name="m"} 64.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 20.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="false",model_name="m"} 10.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 5.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 3.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 15.0
sglang:time_to_first_token_seconds_count{model_name="m"} 15.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 4.5
# TYPE sglang:lora_pool_slots_total gauge
sglang:lora_pool_slots_total{model_name="m"} 8.0
"""
NASTY = 'we"ird} 7\\path'
LOADS = (b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc")
PROCESS = b"""\
# HELP process_cpu_seconds_total Total user and system CPU time spent in seconds.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total %.2f
"""
"""What a server's page begins with. The number grows from page to page."""


def test_a_page_of_vllm_gives_every_field() -> None:
    got = parse_page(vllm_page([BUSY]), scraped_at=12.5)
    assert got.scraped_at == 12.5
    assert (got.running, got.waiting, got.kv_usage) == (3, 2, 0.25)
    assert (got.block_size, got.capacity_tokens) == (16, 16000)
    assert (got.prompt_tokens, got.cached_prompt_tokens, got.generated_tokens) == (1000, 400, 77)
    assert (got.prefix_queries, got.prefix_hits, got.finished) == (1200, 500, 8)
    assert (got.ttft_sum_s, got.ttft_count) == (2.0, 2)
    assert (got.max_lora, got.active_adapters) == (None, frozenset())


def test_engines_of_one_server_add_up_and_their_cache_usage_is_the_mean() -> None:
    other = EngineState(
        running=1, waiting=5, kv_usage=0.75, prompt_tokens=10, finished={"stop": 1}, blocks=500
    )
    got = parse_page(vllm_page([BUSY, other]), scraped_at=0)
    assert (got.running, got.waiting, got.kv_usage) == (4, 7, 0.5)
    assert (got.prompt_tokens, got.finished, got.capacity_tokens) == (1010, 9, 24000)


@pytest.mark.parametrize(
    ("awake", "asleep"), [((b"1", b"1"), False), ((b"1", b"0"), True), ((b"NaN", b"1"), False)]
)
def test_a_server_sleeps_if_one_of_its_engines_does(awake: tuple[bytes, bytes], *, asleep: bool) -> None:
    states = b"# TYPE vllm:engine_sleep_state gauge\n" + b"".join(
        b'vllm:engine_sleep_state{engine="%d",model_name="m",sleep_state="%s"} %s\n' % (n, state, value)
        for n, value in enumerate(awake)
        for state, value in ((b"awake", value), (b"discard_all", b"0"))
    )
    assert parse_page(vllm_page([BUSY, BUSY]) + states, scraped_at=0).asleep is asleep


def test_sglangs_queues_between_prefill_and_decode_count_as_waiting() -> None:
    queues = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
    page = "".join(
        f"# TYPE sglang:num_{name}_queue_reqs gauge\nsglang:num_{name}_queue_reqs {n}\n"
        for n, name in enumerate(queues, 1)
    )
    assert parse_page(SGLANG + page.encode(), scraped_at=0).waiting == 3 + 10


def test_the_names_of_models_on_a_page_are_read_and_bounded() -> None:
    assert parse_page(vllm_page([BUSY, BUSY]), scraped_at=0).models == {MODEL}
    assert parse_page(vllm_page(model="m" * 2000), scraped_at=0).models == frozenset()
    assert parse_page(SGLANG, scraped_at=0).models == {"m"}


SAID: dict[str, tuple[bytes, dict[str, object]]] = {
    "the stated cache size is believed over blocks times size": (
        vllm_page([EngineState(cache_tokens=12345)]),
        {"capacity_tokens": 12345},
    ),
    "an unknown cache size is none": (
        vllm_page([BUSY]).replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="None"'),
        {"capacity_tokens": None, "block_size": 16},
    ),
    "a server without a loaded adapter says so by its count": (
        vllm_page([BUSY]) + b'vllm:num_gpu_loaded_lora_adapters{model_name="m",engine="0"} 0\n',
        {"loaded_adapters": frozenset()},
    ),
    "a server that does not count its loaded adapters": (vllm_page([BUSY]), {"loaded_adapters": None}),
    "an idle server with adapters lists none of them": (
        vllm_page([BUSY], loras=[LoraSeries(at=1.0, running="sql"), LoraSeries(at=2.0)]),
        {"active_adapters": frozenset(), "max_lora": 4},
    ),
    "names with quotes, braces and backslashes are read as written": (
        vllm_page([BUSY], loras=[LoraSeries(at=1.0, running=NASTY)], model=NASTY),
        {"active_adapters": {NASTY}, "models": {NASTY}, "running": 3},
    ),
    "older spellings of vLLM": (
        vllm_page([BUSY])
        .replace(b"kv_cache_usage", b"gpu_cache_usage")
        .replace(b":prefix_", b":gpu_prefix_"),
        {"kv_usage": 0.25, "prefix_queries": 1200, "prefix_hits": 500},
    ),
    "of two spellings of one metric the newer counts once": (
        b"# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.9\n" + vllm_page([BUSY]),
        {"kv_usage": 0.25},
    ),
    "tensor parallel ranks of SGLang do not count twice": (
        (
            b'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 4\n'
            b'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4\n'
            b'sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 3\n'
        ),
        {"running": 7},
    ),
    "an SGLang server that has served nothing does not say its load": (
        b'# TYPE sglang:cache_config_info gauge\nsglang:cache_config_info{num_pages="9"} 1\n',
        {"running": None, "waiting": None, "kv_usage": None, "inside": None},
    ),
    "an older trtllm-serve says nothing of its load": (
        b'trtllm_kv_cache_utilization{model_name="llama",engine_type="trtllm"} 0.5\n',
        {"running": None, "waiting": None, "kv_usage": 0.5},
    ),
    "an unreadable counter is unknown, not zero": (
        b"vllm:num_requests_running 1\nvllm:prompt_tokens_total NaN\nvllm:generation_tokens_total 4\n",
        {"prompt_tokens": None, "generated_tokens": 4},
    ),
    "a last line without its end is not half read": (
        b"vllm:num_requests_running 1\nvllm:prompt_tokens_total 12",
        {"prompt_tokens": None},
    ),
    "a timestamp after the value is not the value": (
        b"vllm:num_requests_running 5 1712345678000\n",
        {"running": 5},
    ),
}


@pytest.mark.parametrize("claim", SAID)
def test_what_a_page_says_is_read(claim: str) -> None:
    page, expected = SAID[claim]
    got = parse_page(page, scraped_at=0)
    assert {name: getattr(got, name) for name in expected} == expected


def test_adapters_that_a_server_says_are_loaded_are_read_with_idle_ones() -> None:
    page = vllm_page([BUSY]) + (
        b"# TYPE vllm:lora_adapter_loaded gauge\n"
        b'vllm:lora_adapter_loaded{model_name="m",engine="0",adapter_name="sql",level="gpu",pinned="false"} 1\n'
        b'vllm:lora_adapter_loaded{model_name="m",engine="0",adapter_name="chat",level="cpu",pinned="false"} 1\n'
        b'vllm:lora_adapter_loaded{model_name="m",engine="1",adapter_name="legal",level="gpu",pinned="true"} 1\n'
        b'vllm:lora_adapter_loaded{model_name="m",engine="1",adapter_name="gone",level="gpu",pinned="true"} 0\n'
        b"# TYPE vllm:num_gpu_loaded_lora_adapters gauge\n"
        b'vllm:num_gpu_loaded_lora_adapters{model_name="m",engine="0"} 1\n'
        b"# TYPE vllm:max_gpu_lora_adapters gauge\n"
        b'vllm:max_gpu_lora_adapters{model_name="m",engine="0"} 6\n'
    )
    got = parse_page(page, scraped_at=0)
    assert got.loaded_adapters == frozenset({"sql", "legal"})
    assert got.max_lora == 6


def test_the_newest_lora_series_counts() -> None:
    series = [
        LoraSeries(at=100.0, running="old"),
        LoraSeries(at=300.0, running="sql,chat", waiting="chat,legal", max_lora=6),
        LoraSeries(at=200.0, running="older"),
    ]
    got = parse_page(vllm_page([BUSY], loras=series), scraped_at=0)
    assert got.active_adapters == {"sql", "chat", "legal"}
    assert got.max_lora == 6


def test_a_page_without_metadata_lines_reads_the_same() -> None:
    page = vllm_page([BUSY], loras=[LoraSeries(at=1.0, running="sql")])
    assert parse_page(without_metadata(page), scraped_at=0) == parse_page(page, scraped_at=0)


def test_the_simulator_counts_prefix_hits_without_a_suffix() -> None:
    page = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:prefix_cache_hits 5\nvllm:prefix_cache_queries 9\n"
    got = parse_page(page, scraped_at=0)
    assert (got.prefix_hits, got.prefix_queries) == (5, 9)


def test_a_page_of_sglang_gives_the_same_fields() -> None:
    got = parse_page(SGLANG, scraped_at=0)
    assert (got.running, got.waiting, got.kv_usage) == (4, 3, 0.28)
    assert (got.capacity_tokens, got.block_size, got.max_lora) == (161721, 64, 8)
    assert (got.prompt_tokens, got.cached_prompt_tokens) == (8128902, 1020)
    assert (got.finished, got.ttft_sum_s, got.ttft_count) == (15, 4.5, 15)
    assert got.prefix_queries is None


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1.0", b"abc", b"1e300", b"0x10"])
@pytest.mark.parametrize("name", LOADS)
def test_an_unreadable_load_fails_the_page(name: bytes, value: bytes) -> None:
    page = b"".join(b"%s %s\n" % pair for pair in (dict.fromkeys(LOADS, b"1") | {name: value}).items())
    with pytest.raises(MetricsError, match="not a number"):
        parse_page(page, scraped_at=0)


def test_one_unreadable_engine_fails_the_load_of_all() -> None:
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} %s\n' % pair for pair in ((0, b"1"), (1, b"NaN"), (2, b"2"))
    )
    with pytest.raises(MetricsError, match="not a number"):
        parse_page(page, scraped_at=0)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n\n",
        b"<html>login</html>\n",
        b"\xff\xfe\x00vllm",
        b"python_info 1\nhttp_requests_total 5\n",
        b"xvllm:foo 1\n",
    ],
)
def test_a_page_of_another_program_is_refused(page: bytes) -> None:
    with pytest.raises(MetricsError, match="no metric of a known"):
        parse_page(page, scraped_at=0)


def test_a_page_cut_before_the_load_is_refused() -> None:
    page = vllm_page([BUSY])
    cut = page[: page.index(b"\nvllm:num_requests_running")]
    waiting = b"\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 0\n"
    with pytest.raises(MetricsError, match="missing"):
        parse_page(cut + waiting, scraped_at=0)


@pytest.mark.parametrize("head", [b"", b"# TYPE vllm:num_requests_running gauge\n"])
@pytest.mark.parametrize("line", [b"vllm:x 1\n", b"# TYPE vllm:x gauge\n", b"vllm:num_requests_running 0\n"])
def test_a_page_of_endless_lines_is_given_up(head: bytes, line: bytes) -> None:
    with pytest.raises(MetricsError, match="more than"):
        parse_page(head + line * 60_000, scraped_at=0)


def test_lines_of_other_programs_do_not_count() -> None:
    ray = b"# TYPE ray_tasks gauge\n" + b'ray_tasks{State="RUNNING"} 1\n' * 20_001
    assert parse_page(ray + vllm_page([BUSY]), scraped_at=0) == parse_page(vllm_page([BUSY]), scraped_at=0)


@pytest.mark.parametrize("engine", PAGES)
@pytest.mark.parametrize("written", [bytes, untyped])
def test_whole_pages_of_other_engines_are_read(engine: str, written: Callable[[bytes], bytes]) -> None:
    page, expected = PAGES[engine]
    got = parse_page(written(page), scraped_at=0)
    assert (got.running, got.waiting, got.kv_usage, got.block_size, got.capacity_tokens) == expected


def test_page_where_only_numbers_of_process_changed_is_not_parsed_again() -> None:
    reader, page = PageReader(), vllm_page([BUSY])
    first = reader.read(PROCESS % 9.5 + page, scraped_at=1.0)
    second = reader.read(PROCESS % 10.5 + page, scraped_at=2.0)
    assert second == replace(first, scraped_at=2.0)
    assert second.models is first.models, "these are the parts of the last page"


@pytest.mark.parametrize(
    "head", [b"", b"#" * 16_380 + b"\n", b"#" * 16_400 + b"\n", b"#" * 16_384, b"# a vllm: metric\n" * 2_000]
)
def test_a_change_is_seen_whatever_stands_before_it(head: bytes) -> None:
    reader = PageReader()
    for running in (1, 2):
        page = head + b"vllm:num_requests_running %d\n" % running * 3
        assert _page_with(reader.read, page) == _page_with(parse_page, page)


def _page_with(read: Callable[..., EndpointMetrics], page: bytes) -> EndpointMetrics | str:
    try:
        return read(page, scraped_at=1.0)
    except MetricsError as error:
        return str(error)
