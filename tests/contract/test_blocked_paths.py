"""The blocked paths, compared with vLLM's own router: no spelling of a path leads to a page for operators.
The list is recorded; if vLLM is built, the tests ask vLLM again.
"""

from collections.abc import Iterator

import pytest

from epp.config.settings import BLOCKED_PATHS
from epp.request.blocked import BlockedPaths
from tests.contract.spellings import combined, single
from tests.contract.vllm_routes import FOR_CLIENTS, ROUTES, SAMPLES, reaches_operators
from tests.vllm_env.environment import VllmEnvironment
from tests.vllm_env.recording import read_routes


def spellings() -> Iterator[str]:
    for path in SAMPLES:
        yield from single(path)
        yield from combined(path, count=300, seed=1)


def test_the_model_of_vllms_router_knows_its_odd_paths() -> None:
    for target in (
        "/metricsX",
        "/metrics.json",
        "/metrics;a=b",
        "/metrics%20",
        "/sleep%0a",
        "/%73leep?a=b",
        "/adapters/x",
    ):
        assert reaches_operators(target), target
    for target in ("/v1/models", "/sleepX", "/Sleep", "//sleep"):
        assert not reaches_operators(target), target


def test_no_spelling_reaches_a_page_for_operators() -> None:
    blocked = BlockedPaths(BLOCKED_PATHS)
    tried = list(spellings())
    assert [target for target in tried if reaches_operators(target) and not blocked.refuse(target)] == []
    assert sum(map(reaches_operators, tried)) > 500, (
        "too few spellings reach a page for operators, so the test shows nothing"
    )


def test_every_single_disguise_is_refused_even_if_vllm_would_not_match_it() -> None:
    """Another gateway or another server may accept a spelling that vLLM does not."""
    blocked = BlockedPaths(BLOCKED_PATHS)
    assert [target for path in SAMPLES for target in single(path) if not blocked.refuse(target)] == []


def test_every_route_for_clients_passes() -> None:
    blocked = BlockedPaths(BLOCKED_PATHS)
    known = {route["path"] for route in ROUTES}
    assert known >= FOR_CLIENTS, "vLLM no longer has one of these routes"
    for path in FOR_CLIENTS:
        for target in (path, f"{path}?a=b", path.replace("{response_id}", "resp_5f3A.x"), f"{path}/"):
            assert not blocked.refuse(target), target


def test_every_listed_path_is_served_by_vllm_or_a_known_exception() -> None:
    # Paths of SGLang, of older releases of vLLM, and of this repository's model server.
    others = {"/resume_kv_cache_memory", "/kv_blocks"}
    unknown = {path for path in BLOCKED_PATHS if not any(s.startswith(path) for s in SAMPLES)}
    assert unknown <= others


@pytest.mark.vllm
def test_the_recorded_routes_are_those_of_this_vllm(vllm_environment: VllmEnvironment) -> None:
    assert read_routes(vllm_environment) == ROUTES
