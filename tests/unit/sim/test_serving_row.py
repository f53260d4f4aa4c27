"""Row 001-7 on the virtual clock: the effect of a shared beginning on a server below its capacity, and at
the document's rate.
"""

from __future__ import annotations

import pytest

from bench.model_server.bench_serving import hit_share, serve, tpot_ms, ttft_s


@pytest.mark.parametrize("rate_per_s", [4.0, 8.0])
def test_001_7_the_documents_load_hits_37_5_percent_and_shortens_both_times(rate_per_s: float) -> None:
    """The document's rate is 8 a second. The modelled server can carry 4 a second without the cache, and
    not 8.
    """
    shared = serve(rate_per_s=rate_per_s, shared=True, seed=1)
    apart = serve(rate_per_s=rate_per_s, shared=False, seed=1)
    assert all(record.completed for record in (*shared, *apart))
    assert hit_share(shared) == pytest.approx(0.375, abs=0.005)
    assert hit_share(apart) == 0
    assert ttft_s(shared) <= 0.75 * ttft_s(apart)
    assert tpot_ms(shared) < tpot_ms(apart)
