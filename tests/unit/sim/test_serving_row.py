"""Row 001-7 on the virtual clock: what a shared start does to a server near what it can carry."""

from __future__ import annotations

import pytest

from tests.bench.model_server.bench_serving import hit_share, serve, tpot_ms, ttft_s


def test_a_shared_start_is_hit_by_all_but_the_first_and_shortens_both_times() -> None:
    shared = serve(rate_per_s=4.0, shared=True, seed=1)
    apart = serve(rate_per_s=4.0, shared=False, seed=1)
    assert all(record.completed for record in (*shared, *apart))
    assert hit_share(shared) == pytest.approx(0.375, abs=0.005)
    assert hit_share(apart) == 0
    assert ttft_s(shared) <= 0.75 * ttft_s(apart)
    assert tpot_ms(shared) < tpot_ms(apart)
