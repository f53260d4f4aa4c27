"""Measures the cost of a pick if one picker serves several models: `python -m bench.bench_models`.

There are four cases with 1,000 endpoints and the same prompts of 1 KB: no endpoint lists a model; all list
one model; the endpoints list ten models, 100 endpoints each, in one pool; or the same ten models in ten
pools. The bench prints the microseconds of CPU for one pick and its end. Then it prints the milliseconds for
a change: a server lists another adapter, or a pod joins or leaves. All figures are medians of rounds. The
cases alternate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from epp.config.policy import DEFAULT_POLICY
from epp.decision import PickRequest
from epp.picker.picker import Picker
from epp.types import (
    Address,
    ApiKind,
    Endpoint,
    EndpointMetrics,
    EndpointName,
    InferenceRequest,
    ModelCard,
    ModelList,
)

_ENDPOINTS = 1000
_PICKS = 500
_ROUNDS = 9


def _endpoints(count: int, *, pools: int) -> list[Endpoint]:
    return [
        Endpoint(EndpointName(f"e{n}"), Address(f"10.0.{n // 250}.{n % 250}", 8000), pool=f"p{n % pools}")
        for n in range(count)
    ]


def _picker(models: int, *, listed: bool, pools: int = 1) -> Picker:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    endpoints = _endpoints(_ENDPOINTS, pools=pools)
    picker.set_endpoints(endpoints, now=0.0)
    if listed:
        picker.take_lists(
            {e.name: ModelList((ModelCard(f"m{n % models}"),)) for n, e in enumerate(endpoints)}, now=0.0
        )
    for endpoint in endpoints:
        picker.observe(
            endpoint.name, EndpointMetrics(scraped_at=0.0, running=0, waiting=0, kv_usage=0.1), now=0.0
        )
    return picker


def _round_us(picker: Picker, models: int, seed: int) -> float:
    draw = random.Random(seed)
    requests = [
        PickRequest(
            request_id=str(n),
            inference=InferenceRequest(
                kind=ApiKind.COMPLETIONS, model=f"m{n % models}", prompt=draw.randbytes(512).hex().encode()
            ),
        )
        for n in range(_PICKS)
    ]
    begun = time.process_time()
    for request in requests:
        picker.end(picker.pick(request, now=1.0), outcome="ended", now=1.0)
    return (time.process_time() - begun) / _PICKS * 1e6


def _change_ms(picker: Picker, pools: int, n: int) -> tuple[float, float]:
    """Return the milliseconds for two changes. In the first a server lists another adapter than before. In
    the second a pod leaves or joins.
    """
    begun = time.process_time()
    model = ModelCard(f"m{n % 10}")
    picker.take_lists(
        {EndpointName(f"e{n}"): ModelList((model, ModelCard(f"a{n}", parent=model.id)))}, now=1.0
    )
    listed = time.process_time()
    picker.set_endpoints(_endpoints(_ENDPOINTS - n % 2, pools=pools), now=1.0)
    return (listed - begun) * 1e3, (time.process_time() - listed) * 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    cases = {
        "1,000 endpoints, nothing listed": (_picker(1, listed=False), 1),
        "1,000 endpoints, one model": (_picker(1, listed=True), 1),
        "1,000 endpoints, ten models of 100": (_picker(10, listed=True), 10),
        "ten pools of 100, one model each": (_picker(10, listed=True, pools=10), 10),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for n in range(_ROUNDS):
        for name, (picker, models) in cases.items():
            taken[name].append(_round_us(picker, models, n))
    for name, rounds in taken.items():
        print(f"{name:40} {statistics.median(rounds):7.1f} us")
    for name, pools in (("1,000 endpoints, ten models of 100", 1), ("ten pools of 100, one model each", 10)):
        changes = [_change_ms(cases[name][0], pools, n) for n in range(_ROUNDS)]
        listed, joined = (statistics.median(times) for times in zip(*changes, strict=True))
        print(
            f"{name:40} {listed:7.1f} ms for a changed list, {joined:.1f} ms for a pod that joins or leaves"
        )


if __name__ == "__main__":
    main()
