"""Follows the cluster: reads the picker's endpoints and policies from it, and writes status to it.

Every process of every replica watches the pools, their pods and the policies, so picking depends on no other
process. Only the first process of a replica writes. News from the API server takes effect through the
callables that the composition root gives. While the API server is away, everything stays as it was.
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


@dataclass(kw_only=True, eq=False)
class Cluster:
    """`run` until cancelled. The callables get the news, and may be called again with the same."""

    settings: Kubernetes
    default: Policy
    """The policy that routes while no policy object does."""
    writes: bool
    """Whether this process writes statuses."""
    keep: Keep
    rng: Random
    on_endpoints: Callable[[Sequence[Endpoint], frozenset[str], frozenset[str]], None]
    """Use these endpoints from now on, of these existing pools. The last are the pools in which a server is
    starting. OSError: this is not possible now."""
    on_policies: Callable[[Policy, Policy | None], None]
    """Route by the first policy, and score by the second one in dry run, if these are other ones than before.
    """
    on_objectives: Callable[[Mapping[str, int]], None]
    """Priority by the name of an InferenceObjective."""
    on_rewrites: Callable[[Rewrites], None]
    """Other names for models."""
    on_judged: Callable[[int, Sequence[str]], None]
    """How many policies are accepted, and why each of the others is not."""
    on_state: Callable[[str, bool], None]
    """Whether the API server lets us follow pods, pool or policies."""
    served: Callable[[], frozenset[str] | None]
    """Returns every model that a server lists. None: not every server has given its list."""

    def __post_init__(self) -> None:
        self._namespace = namespace_of(self.settings)
        here: Any = {"pools": self.settings.names, "namespace": self._namespace}
        self._policies = PolicySet(service=self.settings.service, **here)
        self._rewrites = llmd.rewrites_in(self.settings.rewrites, **here)
        self._objectives = llmd.objectives_in(self.settings.objectives, **here)
        self._dirty = asyncio.Event()

    def set_default(self, default: Policy) -> None:
        """Change the policy that routes while no policy object does."""
        self.default = default
        self._dirty.set()

    async def run(self) -> None:
        """Follow, judge and write. Raises ConfigError if there is no access to the cluster."""
        api = await Api.connect(self.settings)
        try:
            async with asyncio.TaskGroup() as group:
                access = Access(api, self._namespace, self.on_state, self.keep, self.rng, group)
                pools = Pools(access, self.settings, on_endpoints=self.on_endpoints, on_pool=self._dirty.set)
                pools.start()
                followed: list[Claims[Any]] = [self._policies.claims, *self._objectives, *self._rewrites]
                for each in followed:
                    access.follow(each, on_change=self._dirty.set, name=f"watch of the {each.what}")
                access.start(lambda: self._judge(pools), name="judge of the policies")
                if self.writes:
                    access.start(lambda: self._write(StatusWriter(api), pools), name="status writer")
        finally:
            await api.close()

    # -- parts -----------------------------------------------------------------------------------------------

    async def _judge(self, pools: Pools) -> None:
        """Judge the policies, and pass on what all objects say, whenever a spec, a pool or the default policy
        has changed.
        """
        self._dirty.set()  # after a failure, everything is passed on again
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            outcome = self._policies.resolve(default=self.default, existing=pools.existing)
            faults = [
                f"policy {name} is not accepted: {status.conditions[0].message}"
                for name, status in outcome.statuses.items()
                if status.conditions[0].status != "True"
            ]
            self.on_judged(len(outcome.statuses) - len(faults), faults)
            self.on_objectives(llmd.merged(self._objectives))
            self.on_rewrites(llmd.all_rewrites(self._rewrites))
            # These are the last, so that their failure holds nothing back.
            self.on_policies(outcome.acting, outcome.tried)
            await asyncio.sleep(_GATHER_S)

    async def _write(self, writer: StatusWriter, pools: Pools) -> None:
        """Write the statuses that differ. The looks of several replicas are at random times, so mostly the
        first replica writes, and the others see what it wrote.
        """
        while True:
            await asyncio.sleep(_LOOK_S * self.rng.uniform(0.5, 1.5))
            if not pools.settled:
                continue  # nothing is written before everything is known
            existing = pools.existing
            wanted = [
                *self._policies.wanted(self._policies.resolve(default=self.default, existing=existing)),
                *llmd.judge_rewrites(self._rewrites, existing=existing, served=self.served()),
                *llmd.judge_objectives(self._objectives, existing=existing),
            ]
            time_text = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await writer.look(wanted, now=time.monotonic(), time_text=time_text)
