"""Follows the cluster: reads the picker's endpoints and policies from it, and writes status to it.

Every process of every replica watches the pools, their pods and the policies, so picking depends on no other
process. Only the first process of a replica writes. News from the API server takes effect through `Hooks`.
While the API server is away, everything stays as it was. Called by the composition root.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from epp.base.types import Endpoint
from epp.config.policy import Policy
from epp.config.sections import Kubernetes
from epp.request.rewriting import Rewrites
from epp.sources.keep import Keep
from epp.sources.kube import llmd
from epp.sources.kube.api import Api, namespace_of
from epp.sources.kube.policies import PolicySet
from epp.sources.kube.pools import Pools
from epp.sources.kube.reflector import Access
from epp.sources.kube.statuses import Claims, StatusWriter

_GATHER_S: Final = 0.05
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callables of the composition root that get the news from the cluster."""

    endpoints: Callable[[Sequence[Endpoint], frozenset[str], frozenset[str]], None]
    """Use these endpoints from now on, of these existing pools. The last are the pools in which a server is
    starting. OSError: this is not possible now."""
    policies: Callable[[Policy, Policy | None], None]
    """Route by the first policy, and score by the second one in dry run, if these are other ones than before.
    """
    served: Callable[[], frozenset[str] | None]
    """Every model that a server lists. None: not every server has given its list."""
    followed: Callable[[str, bool], None]
    """Whether the API server lets us follow pods, pool or policies."""
    judged: Callable[[int, Sequence[str]], None]
    """How many policies are accepted, and why each of the others is not."""
    objectives: Callable[[Mapping[str, int]], None] = lambda _: None
    """Priority by the name of an InferenceObjective."""
    rewrites: Callable[[Rewrites], None] = lambda _: None
    """Other names for models."""


class Cluster:
    """`run` until cancelled. `default` is the policy that routes while no policy object does."""

    def __init__(
        self, settings: Kubernetes, *, hooks: Hooks, default: Policy, writes: bool, keep: Keep, rng: Random
    ) -> None:
        self._settings = settings
        self._hooks = hooks
        self._default = default
        self._writes = writes
        self._keep = keep
        self._rng = rng
        self._namespace = namespace_of(settings)
        here: Any = {"pools": settings.names, "namespace": self._namespace}
        self._policies = PolicySet(service=settings.service, **here)
        self._rewrites = llmd.rewrites_in(settings.rewrites, **here)
        self._objectives = llmd.objectives_in(settings.objectives, **here)
        self._dirty = asyncio.Event()

    def set_default(self, default: Policy) -> None:
        """Change the policy that routes while no policy object does."""
        self._default = default
        self._dirty.set()

    async def run(self) -> None:
        """Follow, judge and write. Raises ConfigError if there is no access to the cluster."""
        hooks, api = self._hooks, await Api.connect(self._settings)
        try:
            async with asyncio.TaskGroup() as group:
                access = Access(api, self._namespace, hooks.followed, self._keep, self._rng, group)
                pools = Pools(access, self._settings, on_endpoints=hooks.endpoints, on_pool=self._dirty.set)
                pools.start()
                followed: list[Claims[Any]] = [self._policies.claims, *self._objectives, *self._rewrites]
                for each in followed:
                    access.follow(each, on_change=self._dirty.set, name=f"watch of the {each.what}")
                access.start(lambda: self._judge(pools), name="judge of the policies")
                if self._writes:
                    access.start(lambda: self._write(StatusWriter(api), pools), name="status writer")
        finally:
            await api.close()

    # -- parts -----------------------------------------------------------------------------------------------

    async def _judge(self, pools: Pools) -> None:
        """Judge the policies, and pass on what all objects say, whenever a spec, a pool or the default policy
        has changed.
        """
        hooks = self._hooks
        self._dirty.set()  # after a failure, everything is passed on again
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            outcome = self._policies.resolve(default=self._default, existing=pools.existing)
            faults = [
                f"policy {name} is not accepted: {status.conditions[0].message}"
                for name, status in outcome.statuses.items()
                if status.conditions[0].status != "True"
            ]
            hooks.judged(len(outcome.statuses) - len(faults), faults)
            hooks.objectives(llmd.merged(self._objectives))
            hooks.rewrites(llmd.all_rewrites(self._rewrites))
            hooks.policies(outcome.acting, outcome.tried)  # the last, so that its failure holds nothing back
            await asyncio.sleep(_GATHER_S)

    async def _write(self, writer: StatusWriter, pools: Pools) -> None:
        """Write the statuses that differ. The looks of several replicas are at random times, so mostly the
        first replica writes, and the others see what it wrote.
        """
        while True:
            await asyncio.sleep(_LOOK_S * self._rng.uniform(0.5, 1.5))
            if not pools.settled:
                continue  # nothing is written before everything is known
            existing = pools.existing
            wanted = [
                *self._policies.wanted(self._policies.resolve(default=self._default, existing=existing)),
                *llmd.judge_rewrites(self._rewrites, existing=existing, served=self._hooks.served()),
                *llmd.judge_objectives(self._objectives, existing=existing),
            ]
            time_text = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await writer.look(wanted, now=time.monotonic(), time_text=time_text)
