"""The rules that run on both sides: the product's, in the real picker, and some of the benchmark's, behind the same Envoy.

A rule of the benchmark is a `Router` without a process of its own. Live it answers Envoy over ext_proc from the generator's
process (`standin.py`) and hears of first tokens and ends from the client: as exact as in the simulation, where it is told the same.
"""

from __future__ import annotations

from typing import Final

from epp.policy import RuleName
from model_server.sim.fleet import Router
from tests.bench.routing.catalog import BY_NAME, Config, policy_of, router_of
from tests.bench.routing.live.small import SHAPE
from tests.bench.routing.picker_router import PickerRouter

PRODUCT: Final[dict[str, RuleName]] = {
    "least-cost": "least-cost",
    "affinity": "affinity",
    "round-robin": "round-robin",
    "least-load": "least-load",
    "power-of-two": "power-of-two",
    "random": "random",
}
BENCH: Final = tuple(name for name, config in BY_NAME.items() if config.ours is None)
DEFAULTS: Final = (
    "least-cost",
    "affinity",
    "round-robin",
    "least-load",
    "power-of-two",
    "chwbl",
    "sgl",
    "gaie322",
    "lmetric",
)


def is_known(name: str) -> bool:
    return name in PRODUCT or name in BENCH


def simulated_router(name: str, *, seed: int, adapters: frozenset[str]) -> Router:
    """The product's own picker, or the benchmark's rule."""
    if name in PRODUCT:
        return PickerRouter(policy_of(Config(name, ours=PRODUCT[name])), seed=seed, adapters=adapters)
    return router_of(name, shape=SHAPE, seed=seed, adapters=adapters)
