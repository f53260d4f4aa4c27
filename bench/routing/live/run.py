"""Makes one run of the comparison, simulated or live. Both use the same workload object, the same rule and
the same shape of server.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from bench.routing.live.generator import Generator, RunClock, Sent
from bench.routing.live.kept_up import Use, Watch
from bench.routing.live.rules import Product, product_of, simulated_router
from bench.routing.live.small import NUM_SERVERS, SHAPE, WORKLOADS, Small
from bench.routing.live.standin import StandIn, running_stand_in
from bench.routing.rows import Row, row_of
from model_server.sim.fleet import Fleet, FleetPlan, Outcome
from model_server.sim.request import Record
from tests.harness.envoy import EnvoyProcess
from tests.harness.model_servers import MODEL, ModelServer
from tests.harness.processes import wait_until
from tests.harness.redis_server import running_redis
from tests.harness.replicas import running_replicas

Side = Literal["live", "simulated"]


class Lateness(msgspec.Struct, frozen=True):
    """Figures that show whether a live run was on time."""

    sent_p99_s: float
    loop_p99_s: float
    ran_share: dict[str, float]
    """The number of cores used, by user."""
    waited_share: float
    """The seconds for which the processes of the run waited for a core, for each second of running."""
    bypassed: int
    """The number of requests that bypassed the picker, because the picker did not answer in time."""


class Result(msgspec.Struct, frozen=True):
    """The figures of one run."""

    workload: str
    rule: str
    seed: int
    seconds: float
    side: Side
    row: Row
    failures: tuple[str, ...] = ()
    lateness: Lateness | None = None

    @property
    def key(self) -> tuple[str, str, int, float, Side]:
        return (self.workload, self.rule, self.seed, self.seconds, self.side)


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    rule: str
    seed: int
    seconds: float
    """The seconds in which requests arrive."""
    grace_s: float = 8.0
    """The run goes on for this long after the last arrival."""

    @property
    def horizon_s(self) -> float:
        return self.seconds + self.grace_s

    @property
    def small(self) -> Small:
        return WORKLOADS[self.workload]

    def result(self, side: Side, outcome: Outcome, **more: object) -> Result:
        fields = {
            "workload": self.workload,
            "rule": self.rule,
            "seed": self.seed,
            "seconds": self.seconds,
            "side": side,
            "row": row_of(outcome),
        }
        return msgspec.convert({**fields, **more}, Result, from_attributes=True)


def simulate(case: Case) -> Result:
    """Make the same run on the virtual clock, in a second or less."""
    product = product_of(case.rule)
    plan = FleetPlan(
        shape=SHAPE,
        num_servers=NUM_SERVERS,
        horizon_s=case.horizon_s,
        num_scrapers=product.replicas if product else 1,
    )
    router = simulated_router(case.rule, seed=case.seed, adapters=frozenset(case.small.adapters))
    workload = case.small.workload(seed=case.seed, seconds=case.seconds)
    return case.result(
        "simulated", Fleet(plan, router=router, workload=workload, rng=random.Random(case.seed)).run()
    )


async def live(
    case: Case, *, servers: Sequence[ModelServer], session: aiohttp.ClientSession, directory: Path
) -> Result:
    """Make a run on running model servers, whose caches are emptied first. All other processes are started
    for this run only, in `directory`.
    """
    for server in servers:
        await server.forget_prefixes(session)
    clock = RunClock()
    async with AsyncExitStack() as stack:
        product = product_of(case.rule)
        if product is None:
            front = await _stand_in(stack, case, servers, session=session, clock=clock, directory=directory)
        else:
            front = await _pickers(stack, product, case, servers, directory=directory)
        servers_pids = [server.process.pid for server in servers]
        watch = Watch({"servers": servers_pids, "generator": [os.getpid()], **front.pids})
        generator = Generator(
            case.small.workload(seed=case.seed, seconds=case.seconds),
            url=front.envoy.url,
            model=MODEL,
            session=session,
            clock=clock,
            watcher=front.watcher,
        )
        sent = await generator.run(horizon_s=case.horizon_s)
        lateness = _lateness(sent, watch.uses(), bypassed=await front.envoy.bypassed())
        await name_servers(sent, front.envoy)
    return case.result("live", outcome_of(sent), failures=tuple(sent.failures), lateness=lateness)


@dataclass(frozen=True, slots=True)
class _Front:
    """The processes in front of the servers."""

    envoy: EnvoyProcess
    pids: dict[str, list[int]]
    watcher: StandIn | None = None


async def _pickers(
    stack: AsyncExitStack, product: Product, case: Case, servers: Sequence[ModelServer], *, directory: Path
) -> _Front:
    pids: dict[str, list[int]] = {}
    sharing = None
    if product.shared:
        redis = await stack.enter_async_context(running_redis(directory))
        pids["redis"] = [redis.process.pid]
        sharing = {"redis": {"url": redis.url}}
    replicas = await stack.enter_async_context(
        running_replicas(
            directory,
            servers=servers,
            replicas=product.replicas,
            policy={"rule": product.rule},
            sharing=sharing,
            adapters=case.small.adapters,
        )
    )
    if product.shared:
        await replicas.wait_met()
    pids["picker"] = [picker.process.pid for picker in replicas.pickers]
    return _Front(replicas.envoy, {**pids, "envoy": [replicas.envoy.process.pid]})


async def _stand_in(
    stack: AsyncExitStack,
    case: Case,
    servers: Sequence[ModelServer],
    *,
    session: aiohttp.ClientSession,
    clock: RunClock,
    directory: Path,
) -> _Front:
    router = simulated_router(case.rule, seed=case.seed, adapters=frozenset(case.small.adapters))
    standing, envoy = await stack.enter_async_context(
        running_stand_in(directory, router, servers=servers, session=session, clock=clock)
    )
    return _Front(envoy, {"envoy": [envoy.process.pid]}, standing)


async def name_servers(sent: Sent, envoy: EnvoyProcess) -> None:
    """Set which server answered each request, from Envoy's log."""
    ended = [record for record in sent.records if record.ended_s is not None]
    await wait_until(lambda: len(envoy.access_log()) >= len(ended), what="Envoy has written its log")
    served = {entry["request_id"]: entry["served_by"] for entry in envoy.access_log()}
    for record in sent.records:
        record.server = served.get(str(record.request.request_id)) or ""


def outcome_of(sent: Sent, *, servers: int = NUM_SERVERS) -> Outcome:
    """Return the result in the simulator's terms. Values that only a server knows (adapter loads,
    preemptions) stay 0.
    """
    seen = [record for record in sent.records if record.num_cached_tokens is not None]
    return Outcome(
        records=sent.records,
        ended_s=sent.ended_s,
        load_cov=load_cov(sent.records, until_s=sent.ended_s, servers=servers),
        adapter_loads=0,
        preemptions=0,
        query_tokens=sum(record.num_prompt_tokens for record in seen),
        hit_tokens=sum(record.num_cached_tokens or 0 for record in seen),
    )


def load_cov(records: Sequence[Record], *, until_s: float, servers: int = NUM_SERVERS) -> float:
    """Return the coefficient of variation of the requests inside the servers, for each second, averaged. The
    simulated fleet computes it in the same way.
    """
    names = sorted({record.server for record in records if record.server})
    covs = []
    for half in range(1, int(2 * until_s), 2):
        now = half / 2
        inside = dict.fromkeys(names, 0)
        for record in records:
            if record.server and record.arrived_s <= now < (record.ended_s or until_s):
                inside[record.server] += 1
        loads = [*inside.values(), *[0] * (servers - len(inside))]
        mean = sum(loads) / len(loads)
        if mean > 0:
            covs.append((sum((load - mean) ** 2 for load in loads) / len(loads)) ** 0.5 / mean)
    return sum(covs) / len(covs) if covs else 0.0


def _lateness(sent: Sent, uses: dict[str, Use], *, bypassed: int) -> Lateness:
    wall_s = max(sent.ended_s, 1e-9)
    ran_s = sum(use.ran_s for use in uses.values())
    return Lateness(
        sent_p99_s=sent.health.lateness_s.quantile(0.99),
        loop_p99_s=sent.health.lag_s.quantile(0.99),
        ran_share={name: use.ran_s / wall_s for name, use in uses.items()},
        waited_share=sum(use.waited_s for use in uses.values()) / max(ran_s, 1e-9),
        bypassed=bypassed,
    )


async def settled(session: aiohttp.ClientSession, servers: Sequence[ModelServer]) -> None:
    """Wait until no request of the previous run is left in the servers."""

    async def idle() -> bool:
        for server in servers:
            async with session.get(f"{server.url}/metrics") as response:
                page = (await response.text()).splitlines()
            gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            busy = [line for line in page if line.startswith(gauges) and float(line.rpartition(" ")[2])]
            if busy:
                return False
            await asyncio.sleep(0)
        return True

    await wait_until(idle, what="the servers are idle", timeout_s=120)
