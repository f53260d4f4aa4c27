"""Makes one soak run with a real Envoy, two workers, a real Redis, three backends and planned faults. Prints
a line of figures now and then.

A run is good if no request failed without a reason, and if at the end memory and descriptors are flat and
nothing is booked.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp

from bench.soak.attackers import LONGEST_BYTES, NAMES, SICK
from bench.soak.load import RequestCounts, user
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until
from tests.harness.redis_server import RedisServer, running_redis

_WORKERS: Final = 2
_MIB: Final = 2**20
_GROWTH_SHARE: Final = 0.10
_GROWTH_MIB: Final = 24.0
"""How much a worker's memory may grow over the second half of its life, in addition to `_GROWTH_SHARE` of
this memory, because the worker's table fills meanwhile.
"""
_MORE_FILES: Final = 40
_MORE_TASKS: Final = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one worker at one moment."""

    at_s: float
    pid: int
    rss_mib: float
    files: int


@dataclass(slots=True)
class Report:
    """The results of a run. `faults` lists the faults, and is empty if there were none."""

    seen: RequestCounts
    kills: int = 0
    flushes: int = 0
    samples: list[Sample] = field(default_factory=list)
    tasks: tuple[float, float] = (0.0, 0.0)
    """The number of tasks of all workers, before the load and after it."""
    faults: list[str] = field(default_factory=list)

    def grown_mib(self) -> dict[int, tuple[float, float]]:
        """Return the memory of each worker in the middle of its life and at the end. Workers that lived for a
        few samples are left out.
        """
        found = {}
        for pid in {sample.pid for sample in self.samples}:
            life = [sample.rss_mib for sample in self.samples if sample.pid == pid]
            if len(life) >= 6:
                found[pid] = life[len(life) // 2], life[-1]
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    users: int = 12
    pause_s: float = 0.05
    kill_every_s: float = 20.0
    flush_every_s: float = 7.0
    sample_every_s: float = 2.0
    attacks: bool = False
    """Whether attackers are mixed in, one at a time, each for the same part of the run."""


async def soak(plan: Plan, *, directory: Path, say: Callable[[str], None]) -> Report:
    """Make the run. The run has failed if the report has `faults`."""
    async with (
        running_redis(directory) as redis,
        running_gateway(directory, workers=_WORKERS, sharing={"redis": {"url": redis.url}}) as gateway,
    ):
        for backend in gateway.backends:
            backend.behaviour.chunks = 1
            backend.behaviour.chunk_pause_s = 0.01
            backend.behaviour.longest_bytes = LONGEST_BYTES
        return await _soak(gateway, redis, plan, say=say)


async def _soak(gateway: Gateway, redis: RedisServer, plan: Plan, *, say: Callable[[str], None]) -> Report:
    report, stop = Report(RequestCounts()), asyncio.Event()
    files_before = sum(_files(pid) for pid in gateway.picker.worker_pids())

    async def counted() -> bool:
        return await _metric(gateway, "epp_tasks") > 0

    await wait_until(counted, what="the workers have counted their tasks")
    tasks_before = await _metric(gateway, "epp_tasks")
    started = time.monotonic()
    say(
        f"{'s':>6} {'requests':>9} {'failed':>7} {'in flight':>9} {'tasks':>6}  RSS MiB and descriptors of each worker"
    )
    users = [
        asyncio.create_task(user(gateway.client, report.seen, number=n, stop=stop, pause_s=plan.pause_s))
        for n in range(plan.users)
    ]
    attacks = asyncio.create_task(_attack(gateway, plan, report.seen, say=say)) if plan.attacks else None
    try:
        await _cause_faults(gateway, redis, plan, report, started=started, say=say)
    finally:
        if attacks is not None:
            attacks.cancel()
            await asyncio.gather(attacks, return_exceptions=True)
        stop.set()
        await asyncio.gather(*users)
    await _settle(gateway, report, files_before=files_before, tasks_before=tasks_before)
    _judge(report)
    return report


async def _attack(gateway: Gateway, plan: Plan, seen: RequestCounts, *, say: Callable[[str], None]) -> None:
    """Run each attacker in turn, after a part of the run without any, against the first worker."""
    names = (*NAMES, *SICK)
    part_s, calm = plan.seconds / (len(names) + 1), replace(gateway.backends[0].behaviour)
    await asyncio.sleep(part_s)
    for name in names:
        seen.attacker = name
        process = None
        if name in SICK:
            gateway.backends[0].behaviour = replace(calm, **SICK[name])
        else:
            where = (str(gateway.directory / "picker.sock.0"), gateway.client.url)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.soak.attackers", name, *where), stdout=subprocess.PIPE
            )
        try:
            await asyncio.sleep(part_s)
        finally:
            seen.attacker = ""
            gateway.backends[0].behaviour = calm
            if process is not None:
                process.kill()
                said, _ = await process.communicate()
                if rates := sorted(map(float, said.split())):
                    say(f"{name}: {rates[len(rates) // 2]} MB/s in the median second")


async def _cause_faults(
    gateway: Gateway,
    redis: RedisServer,
    plan: Plan,
    report: Report,
    *,
    started: float,
    say: Callable[[str], None],
) -> None:
    """Cause the faults and take the samples, each at its time."""
    rng = random.Random(1)
    due = {"kill": plan.kill_every_s, "flush": plan.flush_every_s, "sample": 0.0}
    while (at := time.monotonic() - started) < plan.seconds:
        if at >= due["kill"]:
            due["kill"] += plan.kill_every_s
            pids = gateway.picker.worker_pids()
            # One picker always stays alive: Envoy would bypass dead pickers, and another test covers that.
            if len(pids) == _WORKERS:
                os.kill(rng.choice(pids), signal.SIGKILL)
                report.kills += 1
        if at >= due["flush"]:
            due["flush"] += plan.flush_every_s
            await redis.do("FLUSHALL")
            report.flushes += 1
        if at >= due["sample"]:
            due["sample"] += plan.sample_every_s
            await _sample(gateway, report, at_s=at, say=say)
        await asyncio.sleep(0.1)


async def _sample(gateway: Gateway, report: Report, *, at_s: float, say: Callable[[str], None]) -> None:
    for backend in gateway.backends:
        backend.received.clear()  # this list takes memory of this process, not of the gateway
    found = [
        Sample(at_s, pid, rss, files)
        for pid in gateway.picker.worker_pids()
        if (rss := _rss_mib(pid)) and (files := _files(pid))
    ]
    report.samples += found
    seen = report.seen
    workers = "   ".join(f"{s.pid}: {s.rss_mib:6.1f} {s.files:4}" for s in found)
    in_flight, tasks = await _metric(gateway, "epp_in_flight"), await _metric(gateway, "epp_tasks")
    say(f"{at_s:6.0f} {seen.sent.total():9} {seen.failed.total():7} {in_flight:9.0f} {tasks:6.0f}  {workers}")


async def _settle(gateway: Gateway, report: Report, *, files_before: int, tasks_before: float) -> None:
    """Wait after the load, until no booking is left and the number of descriptors and tasks is as before."""
    held = ("epp_in_flight", "epp_endpoint_in_flight", "epp_endpoint_peers_in_flight")

    async def free() -> bool:
        return await gateway.picker.ready() and not any([await _metric(gateway, name) for name in held])

    try:
        await wait_until(free, what="no booking is left", timeout_s=60.0)
    except AssertionError as error:
        values = {name: await _metric(gateway, name) for name in held}
        report.faults.append(f"{error}: {values}")
    report.tasks = tasks_before, await _metric(gateway, "epp_tasks")
    files = sum(_files(pid) for pid in gateway.picker.worker_pids())
    if files > files_before + _MORE_FILES:
        report.faults.append(f"{files} descriptors are open, {files_before} before the load")
    if report.tasks[1] > tasks_before + _MORE_TASKS:
        report.faults.append(f"{report.tasks[1]:.0f} tasks, {tasks_before:.0f} before the load")
    if failures := await _metric(gateway, "epp_source_failures_total"):
        report.faults.append(f"{failures:.0f} failures of sources")


def _judge(report: Report) -> None:
    if report.seen.failed:
        report.faults.append(f"requests failed: {dict(report.seen.failed)}; {report.seen.examples}")
    for pid, (middle, end) in report.grown_mib().items():
        if end > middle * (1 + _GROWTH_SHARE) + _GROWTH_MIB:
            report.faults.append(
                f"worker {pid} grew from {middle:.0f} to {end:.0f} MiB over the second half of its life"
            )


async def _metric(gateway: Gateway, name: str) -> float:
    """Return the metric, or 0 while a worker is away."""
    try:
        return await gateway.picker.metric(name)
    except (aiohttp.ClientError, OSError):
        return 0.0


def _rss_mib(pid: int) -> float:
    """Return the memory of the process in MiB, or 0 if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def _files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - counted, not looked at
    except OSError:
        return 0
