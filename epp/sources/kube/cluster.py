"""Follows the cluster: reads the picker's endpoints and policies from it, and writes status to it.

Every process of every replica watches the pools, their pods and the policies, so picking depends on no other
process. Only the first process of a replica writes. News from the API server takes effect through `Hooks`.
While the API server is away, everything stays as it was. Called by the composition root.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from epp.base.types import Endpoint
from epp.config.kubernetes import Kubernetes
from epp.config.policy import Policy
from epp.request.rewriting import Rewrites
from epp.sources.keep import Keep
from epp.sources.kube import claims, statuses
from epp.sources.kube.api import Api, namespace_of
from epp.sources.kube.objects import PATH, ModelRewrite, Objective, PolicyObject
from epp.sources.kube.policies import PolicySet, ResolvedPolicies
from epp.sources.kube.pools import Pools
from epp.sources.kube.reflector import ListSource, Reflector
from epp.sources.kube.statuses import StatusWriter, Unclaimed

_GATHER_S: Final = 0.05
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callables of the composition root that get the news from the cluster."""

    endpoints: Callable[[Sequence[Endpoint], frozenset[str]], None]
    """Use these endpoints from now on, of these existing pools. OSError: this is not possible now."""
    policies: Callable[[Policy, Policy | None], None]
    """Route by the first policy, and score by the second one in dry run."""
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
        self._policies = PolicySet(pools=settings.names, service=settings.service)
        self._outcome = ResolvedPolicies(acting=default, tried=None, verdicts={})
        self._dirty = asyncio.Event()
        self._rewrites = claims.rewrites_in(settings.rewrites, pools=settings.names)
        self._objectives = claims.objectives_in(settings.objectives, pools=settings.names)
        self._rewrites_version = 0

    def set_default(self, default: Policy) -> None:
        """Change the policy that routes while no policy object does."""
        self._default = default
        self._judge_again()

    async def run(self) -> None:
        """Follow, judge and write. Raises ConfigError if there is no access to the cluster."""
        api = await Api.connect(self._settings)
        try:
            async with asyncio.TaskGroup() as group:
                keep, pools = self._keep, self._make_pools(api)
                group.create_task(pools.run(), name="watch of the pools and their pods")
                for each in self._reflectors(api):
                    group.create_task(keep("kubernetes", each.run), name=f"watch of the {each.what}")
                group.create_task(
                    keep("kubernetes", lambda: self._judge(pools)), name="judge of the policies"
                )
                if self._writes:
                    group.create_task(
                        keep("kubernetes", lambda: self._write(api, pools)),
                        name="status writer",
                    )
        finally:
            await api.close()

    # -- parts -----------------------------------------------------------------------------------------------

    def _judge_again(self) -> None:
        self._policies.changed = True
        self._dirty.set()

    def _make_pools(self, api: Api) -> Pools:
        return Pools(
            api,
            self._settings,
            namespace=self._namespace,
            on_endpoints=self._hooks.endpoints,
            on_pool=self._judge_again,
            on_state=self._hooks.followed,
            keep=self._keep,
            rng=self._rng,
        )

    def _reflectors(self, api: Api) -> Iterator[Reflector[Any]]:
        """Yield a reflector for the policies, and one for each API group of objectives and rewrites that the
        settings name. A cluster may have none of these groups.
        """
        followed: Any = [
            ("policies", PolicyObject, PATH, self._policies, self._dirty.set),
            *(
                (f"objectives of {s.group}", Objective, s.path, s, self._use_objectives)
                for s in self._objectives
            ),
            *(
                (f"rewrites of {s.group}", ModelRewrite, s.path, s, self._use_rewrites)
                for s in self._rewrites
            ),
        ]
        for what, kind, path, sink, on_change in followed:
            there = path.format(namespace=self._namespace)
            source = ListSource(what, kind, there, free_form=kind is PolicyObject)
            yield Reflector(
                api, source, sink=sink, on_change=on_change, on_state=self._hooks.followed, rng=self._rng
            )

    def _use_objectives(self) -> None:
        self._hooks.objectives(claims.merged(self._objectives))

    def _use_rewrites(self) -> None:
        """Apply the rewrites if a spec has changed. A status, which we write ourselves, does not count."""
        version = sum(rewrites.version for rewrites in self._rewrites)
        if version != self._rewrites_version:
            self._rewrites_version = version
            self._hooks.rewrites(claims.all_rewrites(self._rewrites))

    async def _judge(self, pools: Pools) -> None:
        """Judge the policies whenever a spec has changed. A change of status has no effect."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._policies.changed:
                before = self._outcome
                after = self._outcome = self._policies.resolve(default=self._default, existing=pools.existing)
                faults = [
                    f"policy {name} is not accepted: {verdict.accepted.message}"
                    for name, verdict in after.verdicts.items()
                    if verdict.accepted.so is not True
                ]
                self._hooks.judged(len(after.verdicts) - len(faults), faults)
                if (after.acting, after.tried) != (before.acting, before.tried):
                    self._hooks.policies(after.acting, after.tried)
            await asyncio.sleep(_GATHER_S)

    async def _write(self, api: Api, pools: Pools) -> None:
        """Write the statuses that differ. The looks of several replicas are at random times, so mostly the
        first replica writes, and the others see what it wrote.
        """
        writer, unclaimed = StatusWriter(api), Unclaimed()
        while True:
            await asyncio.sleep(_LOOK_S * self._rng.uniform(0.5, 1.5))
            if not pools.settled or self._dirty.is_set():
                continue  # nothing is written before everything is known
            now, namespace, time_text = time.monotonic(), self._namespace, _time()
            judged = itertools.chain(
                claims.judge_rewrites(self._rewrites, existing=pools.existing, served=self._hooks.served()),
                claims.judge_objectives(self._objectives, existing=pools.existing),
            )
            due = itertools.chain(
                statuses.due(
                    self._outcome,
                    self._policies,
                    unclaimed=unclaimed,
                    namespace=namespace,
                    time_text=time_text,
                    now=now,
                ),
                claims.due(judged, namespace=namespace, time_text=time_text),
            )
            await writer.look(due, now=now)


def _time() -> str:
    """Return the current time in the format of most Kubernetes objects."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
