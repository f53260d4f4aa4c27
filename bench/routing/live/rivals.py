"""Compares this gateway with vllm-router, sglang-router and Envoy's round robin: `make bench-rivals`.

Each gateway has model servers of its own, whose steps take simulated times. All gateways get the same
requests at the same moments, so other work of the machine disturbs all of them alike. For each run gateways
are fresh and caches are empty. Every gateway has its defaults.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import aiohttp

from bench.dataplane.cpu import CpuMeter
from bench.demo.counters import scrape
from bench.routing.live.generator import Generator, outcome_of
from bench.routing.rows import Row, mean_row, row_of
from bench.routing.workloads import (
    SYSTEM_IDS,
    ClosedLoop,
    OpenLoop,
    Timed,
    Turn,
    length,
    made_request,
    one_client,
)
from bench.tables import Cell, markdown
from model_server.sim.fleet import Workload
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest
from tests.group_env import RIVALS
from tests.harness.envoy import bootstrap_document, connection_manager, running_envoy
from tests.harness.gateway import config_in, running_picker, write_eds, write_endpoints
from tests.harness.model_servers import MODEL, ModelServer, running_model_servers
from tests.harness.ports import free_ports
from tests.harness.processes import managed_process, wait_until

_FLAGS: Final = ("--num-blocks", "2048", "--stream-interval", "4")
"""A cache of 32,768 tokens. A quarter of the events, since all processes share the machine's cores."""
_GRACE_S: Final = 30.0
"""A run goes on for this long after the last arrival."""


@dataclass(frozen=True, slots=True)
class Gateway:
    url: str
    pids: Sequence[int]


@asynccontextmanager
async def _ours(directory: Path, servers: Sequence[ModelServer]) -> AsyncIterator[Gateway]:
    config = config_in(directory)
    write_endpoints(config, servers)
    async with running_picker(config, directory=directory) as picker:
        eds_file = Path(config.envoy.eds_file)
        await wait_until(eds_file.exists, what="the picker writes the endpoints file")
        async with running_envoy(config, directory=directory) as envoy:
            await envoy.wait_endpoints({str(server.address) for server in servers})
            yield Gateway(envoy.url, [envoy.process.pid, picker.process.pid])


@asynccontextmanager
async def _round_robin(directory: Path, servers: Sequence[ModelServer]) -> AsyncIterator[Gateway]:
    """Run our Envoy without its ext_proc filter."""
    config = config_in(directory)
    document = bootstrap_document(config)
    del connection_manager(document)["http_filters"][0]
    addresses = [server.address for server in servers]
    write_eds(config.envoy.eds_file, addresses)
    running = running_envoy(config, directory=directory, document=document, wait_healthy_pickers=0)
    async with running as envoy:
        await envoy.wait_endpoints(set(map(str, addresses)))
        yield Gateway(envoy.url, [envoy.process.pid])


@asynccontextmanager
async def _router(directory: Path, servers: Sequence[ModelServer], *, module: str) -> AsyncIterator[Gateway]:
    """Run another project's router. The default policy of both is the cache-aware one."""
    port, metrics_port = free_ports(2)
    flags = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
    urls = [server.url for server in servers]
    command: list[str | Path] = [RIVALS.require().python, "-m", module, "--worker-urls", *urls, *flags]
    async with (
        managed_process("router", command, directory=directory) as process,
        aiohttp.ClientSession() as session,
    ):

        async def answers() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await process.wait_ready(answers)
        yield Gateway(f"http://127.0.0.1:{port}", [process.pid])


GATEWAYS: Final[
    Mapping[str, Callable[[Path, Sequence[ModelServer]], AbstractAsyncContextManager[Gateway]]]
] = {
    "prefix-gateway": _ours,
    "vllm-router": partial(_router, module="vllm_router.launch_router"),
    "sglang-router": partial(_router, module="sglang_router.launch_router"),
    "Envoy's round robin": _round_robin,
}


def _talks(rng: random.Random) -> Iterator[Sequence[Turn]]:
    while True:
        yield [
            Turn(
                added_tokens=length(rng, mean=150 if n else 1000, sigma=0.5, least=20, most=3000),
                answer_tokens=length(rng, mean=50, sigma=0.4, least=10, most=150),
                think_s=rng.expovariate(1 / 4),
                system=None if n else Segment(SYSTEM_IDS + rng.randrange(16), 1500),
            )
            for n in range(rng.randint(3, 6))
        ]


def _tenants(rng: random.Random, seconds: float) -> Workload:
    return ClosedLoop(_talks(rng), users=40, until_s=seconds, ramp_s=seconds / 6)


def _serial(rng: random.Random, seconds: float) -> Workload:
    prompts = one_client(rng, prompts=18, tokens=5000)
    return ClosedLoop(prompts, users=1, until_s=seconds, ramp_s=0.0)


def _group(rng: random.Random, n: int) -> SimRequest:
    group = rng.randrange(24)
    question = Segment(SYSTEM_IDS + 1000 + 5 * group + rng.randrange(5), 600)
    return made_request(n, (Segment(SYSTEM_IDS + group, 3000), question), 1, 100)


def _half_shared(rng: random.Random, n: int) -> SimRequest:
    return made_request(n, (Segment(SYSTEM_IDS, 2500),), 2500, 100)


def _chat_or_document(rng: random.Random, n: int) -> SimRequest:
    if rng.random() < 5 / 6:
        own = length(rng, mean=150, sigma=0.8, least=20, most=1000)
        return made_request(n, (Segment(SYSTEM_IDS + rng.randrange(4), 500),), own, 60)
    document = n // 20 + rng.randrange(3)  # each is asked about for a while
    tokens = random.Random(document).randint(6000, 16_000)
    return made_request(n, (Segment(SYSTEM_IDS + 10 + document, tokens),), 60, 60)


def _open(
    rng: random.Random, seconds: float, *, make: Callable[[random.Random, int], SimRequest], rate_per_s: float
) -> Workload:
    timed = [Timed(rng.expovariate(1), make(rng, n)) for n in range(round(seconds * rate_per_s))]
    return OpenLoop(timed, rate_per_s=rate_per_s)


# Each workload is made from a seed, for some seconds. The number is that of each gateway's servers.
PLACES: Final[Mapping[str, tuple[int, Callable[[random.Random, float], Workload]]]] = {
    "multi-turn tenants": (4, _tenants),
    "one request at a time": (4, _serial),
    "groups and questions": (4, partial(_open, make=_group, rate_per_s=6.0)),
    "half of each prompt shared": (2, partial(_open, make=_half_shared, rate_per_s=3.0)),
    "chats beside long documents": (4, partial(_open, make=_chat_or_document, rate_per_s=7.0)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one gateway with one workload and one seed."""

    row: Row
    busiest: float
    """Requests that the busiest server answered, divided by the mean of the servers."""
    cpu_ms: float
    """CPU of the gateway's processes for each request."""
    failures: Sequence[str]
    late_s: float
    """How late the client sent, at the 99th percentile."""


async def _run(
    name: str, servers: Sequence[ModelServer], workload: Workload, *, seconds: float, ready: asyncio.Barrier
) -> Run:
    """Start a gateway, wait until the other gateways of this run are ready too, and send the requests."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rivals-")))
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        urls = [server.url for server in servers]
        for url in urls:
            (await session.post(f"{url}/reset_prefix_cache")).raise_for_status()
        gateway = await stack.enter_async_context(GATEWAYS[name](folder, servers))
        generator = Generator(workload, url=gateway.url, model=MODEL, session=session)
        await ready.wait()
        before, cpu = await scrape(session, urls), CpuMeter({str(pid): pid for pid in gateway.pids})
        sent = await generator.run(horizon_s=seconds + _GRACE_S)
        used_s, after = sum(cpu.lap().values()), await scrape(session, urls)
    answered = [new.since(old).finished for new, old in zip(after, before, strict=True)]
    return Run(
        row=row_of(outcome_of(sent)),
        busiest=max(answered) / fmean(answered),
        cpu_ms=1000 * used_s / len(sent.records),
        failures=sent.failures,
        late_s=sent.lag_s.quantile(0.99),
    )


async def runs_of(places: Sequence[str], *, seeds: int, seconds: float) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each workload and gateway, one for each seed."""
    made: dict[tuple[str, str], list[Run]] = {(place, name): [] for place in places for name in GATEWAYS}
    async with AsyncExitStack() as stack:
        fleets = {}
        for name in GATEWAYS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rivals-")))
            running = running_model_servers(folder, count=4, flags=_FLAGS)
            fleets[name] = await stack.enter_async_context(running)
        for seed, place in itertools.product(range(1, seeds + 1), places):
            (count, workload), ready, tasks = PLACES[place], asyncio.Barrier(len(GATEWAYS)), {}
            async with asyncio.TaskGroup() as group:
                for name, servers in fleets.items():
                    sending = workload(random.Random(seed), seconds)
                    run = _run(name, servers[:count], sending, seconds=seconds, ready=ready)
                    tasks[name] = group.create_task(run)
            for name, task in tasks.items():
                found = task.result()
                made[place, name].append(found)
                line = f"{place}, seed {seed}, {name}: {found.row.ttft_mean_s:.3f} s"
                print(line, *found.failures[:2], file=sys.stderr, flush=True)
    return made


_COLUMNS: Final = (
    *("workload", "gateway", "TTFT mean s", "times ours", "p50", "p90", "TPOT p90 ms", "hits"),
    *("busiest server", "CPU ms a request", "failed", "requests"),
)


def report(made: Mapping[tuple[str, str], Sequence[Run]]) -> str:
    """Return a table of means over the seeds. `times ours`: the mean TTFT, divided by the first gateway's."""
    lines: list[list[Cell]] = []
    for (place, name), runs in made.items():
        row = mean_row([run.row for run in runs])
        ours = mean_row([run.row for run in made[place, next(iter(GATEWAYS))]])
        figures = (row.ttft_mean_s, row.ttft_mean_s / ours.ttft_mean_s, row.ttft_p50_s, row.ttft_p90_s)
        others = (row.hit_ratio, fmean(run.busiest for run in runs), fmean(run.cpu_ms for run in runs))
        counts = (sum(len(run.failures) for run in runs), round(row.requests * len(runs)))
        lines.append([place, name, *figures, round(1000 * row.tpot_p90_s), *others, *counts])
    late_ms = 1000 * max(run.late_s for runs in made.values() for run in runs)
    return f"{markdown(_COLUMNS, lines)}\n\nThe client sent {late_ms:.0f} ms late (p99 of the worst run)."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routing.live.rivals", description=__doc__)
    add = parser.add_argument
    add("--places", default=",".join(PLACES), metavar="A,B", help="workloads (default: %(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="number of seeds (default %(default)s)")
    add("--seconds", type=float, default=45.0, metavar="S", help="arrivals of a run (default %(default)s)")
    args = parser.parse_args()
    places = args.places.split(",")
    if unknown := [name for name in places if name not in PLACES]:
        parser.error(f"no such workload: {', '.join(unknown)}")
    made = asyncio.run(runs_of(places, seeds=args.seeds, seconds=args.seconds))
    print(report(made))
    return 1 if any(run.failures for runs in made.values() for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
