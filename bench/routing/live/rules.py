"""Lists the rules that run on both sides: the product's rules, in the real picker, and some of the
benchmark's rules, behind the same Envoy.

A rule of the benchmark is a `Router` without its own process. In a live run it answers Envoy over ext_proc
from the generator's process (`standin.py`), and the client reports first tokens and ends to it. So the rule
knows as much as in the simulation. A rule of the product may run in several pickers: `least-cost*4` runs in
four pickers that share over a real Redis, `least-cost/4` in four that share nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bench.routing.catalog import BY_NAME, Config, policy_of_config, router_of
from bench.routing.live.small import SHAPE
from bench.routing.picker_router import PickerRouter
from epp.config.policy import RuleName
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
"""The simulated time from one picker's report until the other pickers know it."""


@dataclass(frozen=True, slots=True)
class Product:
    """A rule of the product, in this many pickers."""

    rule: RuleName
    replicas: int = 1
    shared: bool = False


def product_of(name: str) -> Product | None:
    """Return the product's rule of this name, or None for a rule of the benchmark. Raise ValueError if there
    is no such rule.
    """
    match = re.fullmatch(r"([a-z-]+)(?:([*/])([1-9]))?", name)
    if match and match[1] in PRODUCT:
        return Product(PRODUCT[match[1]], int(match[3] or 1), shared=match[2] == "*")
    if name not in BENCH:
        raise ValueError(f"no such rule: {name}; there are {', '.join((*PRODUCT, *BENCH))}")
    return None


def simulated_router(name: str, *, seed: int, adapters: frozenset[str]) -> Router:
    """Return the product's own picker, or the benchmark's rule. Raise ValueError if there is no such rule."""
    product = product_of(name)
    if product is None:
        return router_of(name, shape=SHAPE, seed=seed, adapters=adapters)
    return PickerRouter(
        policy_of_config(Config(name, ours=product.rule)),
        seed=seed,
        replicas=product.replicas,
        share_delay_s=SHARE_DELAY_S if product.shared else None,
        adapters=adapters,
    )
