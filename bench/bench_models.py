"""The cost of a pick where one picker serves several models: `python -m bench.bench_models`.

1,000 endpoints that list one model, and 1,000 that list ten, 100 servers each; the same prompts of 1 KB. Prints microseconds of CPU for
one pick and its end: the median of rounds, old and new cases interleaved.
"""

from __future__ import annotations

import random
import statistics
import time

from epp.config.policy import DEFAULT_POLICY
from epp.decision import PickRequest
from epp.endpoints.served_models import ModelCard, ModelList
from epp.picker import Picker
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest

_ENDPOINTS = 1000
_PICKS = 500
_ROUNDS = 9


def _picker(models: int, *, listed: bool) -> Picker:
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    endpoints = [
        Endpoint(EndpointName(f"e{n}"), Address(f"10.0.{n // 250}.{n % 250}", 8000))
        for n in range(_ENDPOINTS)
    ]
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


def main() -> None:
    cases = {
        "1,000 endpoints, nothing listed": (_picker(1, listed=False), 1),
        "1,000 endpoints, one model": (_picker(1, listed=True), 1),
        "1,000 endpoints, ten models of 100": (_picker(10, listed=True), 10),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for n in range(_ROUNDS):
        for name, (picker, models) in cases.items():
            taken[name].append(_round_us(picker, models, n))
    for name, rounds in taken.items():
        print(f"{name:40} {statistics.median(rounds):7.1f} us")


if __name__ == "__main__":
    main()
