"""The rules that run on both sides: the product's, in the real picker, and some of the benchmark's,
behind the same Envoy.

A rule of the benchmark is a `Router` without a process of its own. Live it answers Envoy over ext_proc from
the generator's process (`standin.py`) and hears of first tokens and ends from the client: as exact as in the
simulation, where it is told the same. A rule of the product may run in several pickers: `least-cost*4` in
four that share over a real Redis, `least-cost/4` in four that tell each other nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bench.routing.catalog import BY_NAME, Config, policy_of, router_of
from bench.routing.live.small import SHAPE
from epp.config.policy import RuleName
from epp.replay.picker_router import PickerRouter
from model_server.sim.fleet import Router

PRODUCT: Final[dict[str, RuleName]] = {
    "least-cost": "least-cost",
    "affinity": "affinity",
    "round-robin": "round-robin",
    "least-load": "least-load",
    "power-of-two": "power-of-two",
    "session": "session",
    "prefix-hash": "prefix-hash",
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


SHARE_DELAY_S: Final = 0.05
"""In the simulator, from one picker's telling to the others' hearing."""


@dataclass(frozen=True, slots=True)
class Product:
    """A rule of the product in so many pickers."""

    rule: RuleName
    replicas: int = 1
    shared: bool = False


def product_of(name: str) -> Product | None:
    """None: the benchmark's own rule. ValueError: there is no such rule."""
    match = re.fullmatch(r"([a-z-]+)(?:([*/])([1-9]))?", name)
    if match and match[1] in PRODUCT:
        return Product(PRODUCT[match[1]], int(match[3] or 1), shared=match[2] == "*")
    if name not in BENCH:
        raise ValueError(f"no such rule: {name}; there are {', '.join((*PRODUCT, *BENCH))}")
    return None


def simulated_router(name: str, *, seed: int, adapters: frozenset[str]) -> Router:
    """The product's own picker, or the benchmark's rule. ValueError: there is no such rule."""
    product = product_of(name)
    if product is None:
        return router_of(name, shape=SHAPE, seed=seed, adapters=adapters)
    return PickerRouter(
        policy_of(Config(name, ours=product.rule)),
        seed=seed,
        replicas=product.replicas,
        share_delay_s=SHARE_DELAY_S if product.shared else None,
        adapters=adapters,
    )
