"""The table of metrics of servers: each name means one number, and belongs to a known kind of server."""

from collections import Counter

import pytest

from epp.sources.scraping.metric_names import FAMILIES, KNOWN, NAMES, NAMESPACES
from epp.sources.scraping.metrics_page import parse_page


def test_a_name_stands_for_one_number_only() -> None:
    names = Counter(name for spellings in NAMES.values() for name in spellings)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_prefix_of_a_known_server_has_names() -> None:
    assert all(any(name.startswith(each) for name in KNOWN) for each in NAMESPACES)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (b"vllm:prompt_tokens_total", b"vllm:prompt_tokens"),
        (b"vllm:time_to_first_token_seconds_sum", b"vllm:time_to_first_token_seconds"),
        (b"vllm:time_to_first_token_seconds_count", b"vllm:time_to_first_token_seconds"),
        (b"nv_trt_llm_request_metrics", b"nv_trt_llm_request_metrics"),
    ],
)
def test_a_page_names_the_family_of_a_metric_without_its_suffix(name: bytes, family: bytes) -> None:
    """Some servers write `# TYPE name_total`, and others `# TYPE name`."""
    assert name in KNOWN
    assert {name, family} <= FAMILIES


@pytest.mark.parametrize("field", ["running", "waiting"])
def test_every_spelling_of_the_load_is_read(field: str) -> None:
    """A page of vLLM without its gauge of running requests is refused, so this gauge is always there."""
    for spelling in NAMES[field]:
        family, brace, condition = spelling.partition("{")
        label, _, value = condition.rstrip("}").partition("=")
        line = f'{family}{{{label}="{value}"}} 7\n' if brace else f"{family} 7\n"
        page = f"# TYPE {family} gauge\n{line}"
        if family.startswith("vllm:") and field != "running":
            page += "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
        assert getattr(parse_page(page.encode(), scraped_at=1.0), field) == 7, spelling
