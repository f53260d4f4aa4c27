"""Makes one soak run with a real Envoy, two workers, a real Redis, three backends and planned faults. Prints
a line of figures now and then.

A run is good if no request failed without a reason, and if at the end memory and descriptors are flat and
nothing is booked.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp

from bench.soak.attackers import ATTACKERS, LONGEST_BYTES, SICK
from bench.soak.load import RequestCounts, user
from bench.tables import Cell, percentile
from tests.harness.gateway import Gateway, running_gateway
from tests.harness.processes import wait_until
from tests.harness.redis_server import RedisServer, running_redis

_WORKERS: Final = 2
_GROWTH: Final = 1.1
"""By how much a worker's memory may grow over the second half of its life."""
_MORE: Final = 40
"""Most descriptors and tasks that all workers together may have more after the load than before it."""
_SLOW_MS: Final = 50.0
"""The 99th percentile of usual requests has to be less beside each attacker."""
_SICK_SHARE: Final = 0.02
"""Most requests that a sick server may get, once it has been sick for `_NOTICED_S`."""
_NOTICED_S: Final = 5.0


@dataclass(slots=True)
class Report:
    """The results of a run. `faults` lists the faults, and is empty if there were none."""

    seen: RequestCounts
    done: Counter[str] = field(default_factory=Counter)
    """How often a picker was killed, Redis flushed, and a sample taken."""
    mib: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The memory of each worker at every sample, by process id."""
    faults: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    """The number of requests that each server got."""
    rates: dict[str, str] = field(default_factory=dict)
    """MB/s of each attacker that counts them, in its median second."""
    shares: dict[str, float] = field(default_factory=dict)
    """The share of the sick server after `_NOTICED_S`, by attacker."""

    def rows(self) -> list[list[Cell]]:
        """Return for each attacker what it cost the others, and whether the promises were met beside it."""
        found: list[list[Cell]] = []
        for name, seconds in self.seen.seconds.items():
            failed, share = self.seen.failed[name], self.shares.get(name, 0.0)
            p50, p99 = (1000 * percentile(seconds, q) for q in (0.5, 0.99))
            well = p99 < _SLOW_MS and share <= _SICK_SHARE and (name in SICK or not failed)
            cells = name, self.rates.get(name, ""), len(seconds), failed, f"{p50:.0f}", f"{p99:.0f}"
            found.append([*cells, f"{share:.1%}" if name in SICK else "", "met" if well else "missed"])
        return found

    def grown_mib(self) -> dict[int, tuple[float, float]]:
        """Return the memory of each worker in the middle of its life and at the end. Workers whose start is a
        large part of their life are left out.
        """
        return {pid: (life[len(life) // 2], life[-1]) for pid, life in self.mib.items() if len(life) >= 12}


async def soak(seconds: float, *, users: int, attacks: bool, directory: Path) -> Report:
    """Make the run, which has failed if the report has `faults`. attacks: one attacker is let at the gateway
    after the other, each for the same part of the run.
    """
    report, stop = Report(RequestCounts()), asyncio.Event()
    async with (
        running_redis(directory) as redis,
        running_gateway(directory, workers=_WORKERS, sharing={"redis": {"url": redis.url}}) as gateway,
    ):
        for backend in gateway.backends:
            backend.behaviour.chunks = 1
            backend.behaviour.chunk_pause_s = 0.01
            backend.behaviour.longest_bytes = LONGEST_BYTES
            backend.models = [{"id": "m"}]

        async def counted() -> bool:
            return await _metric(gateway, "epp_tasks") > 0

        await wait_until(counted, what="the workers have counted their tasks")
        before = await _held(gateway)
        load = asyncio.gather(*(user(gateway.client, report.seen, number=n, stop=stop) for n in range(users)))
        async with asyncio.TaskGroup() as group:
            group.create_task(_cause_faults(gateway, redis, report, seconds=seconds))
            if attacks:
                group.create_task(_attack(gateway, report, seconds=seconds))
        stop.set()
        await load
        await _settle(gateway, report, before=before)
    _judge(report)
    return report


async def _attack(gateway: Gateway, report: Report, *, seconds: float) -> None:
    """Run each attacker in turn, after a part of the run without any, against the first worker."""
    names = (*ATTACKERS, *SICK)
    part_s, calm = seconds / (len(names) + 1), replace(gateway.backends[0].behaviour)
    await asyncio.sleep(part_s)
    for name in names:
        report.seen.attacker = name
        process, before = None, Counter[str]()
        if name in SICK:
            gateway.backends[0].behaviour = replace(calm, **SICK[name])
        else:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.soak.attackers", name, gateway.directory, gateway.client.url),
                stdout=subprocess.PIPE,
            )
        try:
            await asyncio.sleep(min(_NOTICED_S, part_s / 2))
            before = _served(gateway, report)
            await asyncio.sleep(max(part_s - _NOTICED_S, part_s / 2))
        finally:
            gateway.backends[0].behaviour = calm
            if process is not None:
                process.terminate()
                output, _ = await process.communicate()
                if rates := [float(rate) for rate in output.split()]:
                    report.rates[name] = f"{percentile(rates, 0.5):.1f}"
            elif before:
                since = _served(gateway, report) - before
                report.shares[name] = since[gateway.backends[0].name] / max(1, since.total())
            report.seen.attacker = "none"


def _served(gateway: Gateway, report: Report) -> Counter[str]:
    """Count the requests that each server has got so far, and forget them, for they fill memory."""
    for backend in gateway.backends:
        report.served[backend.name] += len(backend.prompts)
        backend.received.clear()
    return Counter(report.served)


async def _cause_faults(gateway: Gateway, redis: RedisServer, report: Report, *, seconds: float) -> None:
    """Cause the faults and take the samples, each at its time."""
    rng, started = random.Random(1), time.monotonic()
    every = {"kill": max(7.0, seconds / 4), "flush": max(3.0, seconds / 20), "sample": max(1.0, seconds / 60)}
    due = {**every, "sample": 0.0}
    print(
        f"{'s':>6} {'requests':>9} {'failed':>7} {'in flight':>9} {'tasks':>6}   RSS MiB, descriptors by worker"
    )
    while (at := time.monotonic() - started) < seconds:
        for name in [name for name in due if at >= due[name]]:
            due[name] += every[name]
            pids = gateway.picker.worker_pids()
            if name == "sample":
                await _sample(gateway, report, at_s=at)
            elif name == "flush":
                await redis.do("FLUSHALL")
            elif len(pids) < _WORKERS or report.seen.attacker in ("names of servers", "lists in bytes"):
                continue  # Envoy bypasses dead pickers and may go to bad servers, which other tests cover
            else:
                os.kill(rng.choice(pids), signal.SIGKILL)
            report.done[name] += 1
        await asyncio.sleep(0.1)


async def _sample(gateway: Gateway, report: Report, *, at_s: float) -> None:
    _served(gateway, report)
    workers, seen = "", report.seen
    for pid in gateway.picker.worker_pids():
        mib, files = _usage(pid)
        if mib:
            report.mib[pid].append(mib)
            workers += f"   {pid}: {mib:6.1f} {files:4}"
    in_flight, tasks = await _metric(gateway, "epp_in_flight"), await _metric(gateway, "epp_tasks")
    print(
        f"{at_s:6.0f} {seen.sent.total():9} {seen.faults:7} {in_flight:9.0f} {tasks:6.0f}{workers}",
        flush=True,
    )


async def _held(gateway: Gateway) -> dict[str, float]:
    """Return what the workers hold that does not depend on the load."""
    files = sum(_usage(pid)[1] for pid in gateway.picker.worker_pids())
    return {"descriptors": files, "tasks": await _metric(gateway, "epp_tasks")}


async def _settle(gateway: Gateway, report: Report, *, before: dict[str, float]) -> None:
    """Wait after the load, until no booking is left and the number of descriptors and tasks is as before."""
    held = ("epp_in_flight", "epp_endpoint_in_flight", "epp_endpoint_peers_in_flight")

    async def free() -> bool:
        return await gateway.picker.ready() and not any([await _metric(gateway, name) for name in held])

    try:
        await wait_until(free, what="no booking is left", timeout_s=60.0)
    except AssertionError as error:
        values = {name: await _metric(gateway, name) for name in held}
        report.faults.append(f"{error}: {values}")
    for name, count in (await _held(gateway)).items():
        if count > before[name] + _MORE:
            report.faults.append(f"{count:.0f} {name}, {before[name]:.0f} before the load")
    if failures := await _metric(gateway, "epp_source_failures_total"):
        report.faults.append(f"{failures:.0f} failures of sources")


def _judge(report: Report) -> None:
    if report.seen.faults:
        report.faults.append(f"requests failed: {dict(report.seen.failed)}; {report.seen.examples}")
    for pid, (middle, end) in report.grown_mib().items():
        if end > middle * _GROWTH:
            report.faults.append(
                f"worker {pid} grew from {middle:.0f} to {end:.0f} MiB over the second half of its life"
            )


async def _metric(gateway: Gateway, name: str) -> float:
    """Return the metric, or 0 while a worker is away."""
    try:
        return await gateway.picker.metric(name)
    except (aiohttp.ClientError, OSError):
        return 0.0


def _usage(pid: int) -> tuple[float, int]:
    """Return the memory of the process in MiB and its descriptors. Both are 0 if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - counted, not looked at
    except OSError:
        return 0.0, 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files
