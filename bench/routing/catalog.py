"""Lists every rule that is compared. Each line is one configuration. The real picker runs the configurations
that are `ours`, and `peer.PeerRouter` runs all others, with the settings of the projects' own documentation.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.routing import rules
from bench.routing.peer import HoldingRouter, Index, PeerRouter, Rule, World
from bench.routing.picker_router import PickerRouter
from epp.config.policy import DEFAULT_POLICY, Policy, RuleName
from model_server.sim.engine import EngineShape
from model_server.sim.fleet import Router


@dataclass(frozen=True, slots=True)
class Config:
    """One rule with its settings."""

    name: str
    rule: Callable[..., Rule] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    ours: RuleName | None = None
    """A rule of the product, with its default settings."""
    pages_every_s: float | None = None
    """The interval at which the rule reads the servers' pages, if its project reads them more often than
    others. None means the same interval as all others.
    """
    busy_steps: float | None = None
    """Requests wait in front of the rule while every server has more prefill tokens than it computes in this
    many steps. None means that no request waits.
    """


CONFIGS: tuple[Config, ...] = (
    Config("least-cost", ours="least-cost"),
    Config("affinity", ours="affinity"),
    Config("prefix-hash", ours="prefix-hash"),
    Config("session", ours="session"),
    Config("exact", rules.ExactCost),
    Config(
        "calibration",
        rules.ExactCost,
        {"weight": 3.0, "stall": 0.0, "per_request": 120.0, "near_tie": 0.05},
    ),
    Config("rr", rules.RoundRobin),
    Config("least", rules.LeastLoad),
    Config("ps-loadaware", rules.LoadAware),
    Config("simhash", rules.SimHash),
    Config("hash-trie", rules.HashTrie),
    Config("sgl", rules.RadixTree),
    Config("sgl-zmq", rules.DeepestHolder),
    Config("aibrix", rules.Aibrix),
    Config("aibrix-pd", rules.AibrixPd),
    Config("dynamo", rules.Dynamo, busy_steps=16.0),
    Config("lmetric", rules.LMetric),
    Config("lpwl", rules.LeastWork),
    Config("gaie322", rules.WeightedSum, pages_every_s=0.05),
    Config("llmd-affinity", rules.LlmdAffinity),
)

BY_NAME = {config.name: config for config in CONFIGS}


def is_ours(name: str) -> bool:
    """Return whether this is a rule of the product, or a candidate for one."""
    return BY_NAME[name].ours is not None or BY_NAME[name].rule is rules.ExactCost


RIVALS = tuple(name for name in BY_NAME if not is_ours(name))
"""Other projects' rules with their documented settings."""


def policy_of_config(config: Config) -> Policy:
    assert config.ours is not None
    spec = msgspec.structs.replace(DEFAULT_POLICY.spec, rule=config.ours)
    return msgspec.structs.replace(DEFAULT_POLICY, spec=spec)


def router_of(
    name: str,
    *,
    shape: EngineShape,
    seed: int,
    replicas: int = 1,
    share_delay_s: float | None = None,
    adapters: frozenset[str] = frozenset(),
) -> Router:
    """Return the router of a named configuration for servers of this shape. Only our rules have replicas: one
    router of another rule knows everything.
    """
    config = BY_NAME[name]
    if config.ours is not None:
        return PickerRouter(
            policy_of_config(config),
            seed=seed,
            replicas=replicas,
            share_delay_s=share_delay_s,
            adapters=adapters,
        )
    assert config.rule is not None

    world = World(
        rng=random.Random(seed * 1000),
        block_tokens=shape.block_tokens,
        capacity_blocks=shape.num_blocks,
    )
    rule = config.rule(world, **config.settings)
    share = rule.index_capacity
    index = Index(None if share is None else int(share * shape.num_blocks))
    if config.busy_steps is None:
        return PeerRouter(rule, world, index=index)
    busy_tokens = int(config.busy_steps * shape.limits.max_num_batched_tokens)
    return HoldingRouter(rule, world, index=index, busy_tokens=busy_tokens)


NEAR = (
    "least-cost",
    "llmd-affinity",
    "lmetric",
    "lpwl",
    "aibrix",
    "aibrix-pd",
    "gaie322",
    "sgl",
    "sgl-zmq",
    "ps-loadaware",
    "dynamo",
)
"""The default rule, and the other rules that come near it on some workload."""
