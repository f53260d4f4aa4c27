"""Measures cells in rounds: in each round every variant serves the same load for a moment, in a new random
order.

A cell is one size of prompt and of answer. The CPU that a process uses without any request (scrapes, health
checks) is measured first and subtracted, so that a slow cell does not look expensive. Where pickers scrape
very many endpoints, it is measured again in each round, while the other pickers serve (`Cell.scrapes_count`).
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.dataplane.cpu import CpuMeter
from bench.dataplane.load import Client, Prompts
from bench.dataplane.rig import VARIANTS, Process, Rig, Variant, VariantName

_WARM_UP_S: Final = 0.15
_SPREAD_S: Final = 0.4
"""Streamed answers begin spread over this time, not all at once."""
_ENDS_S: Final = 0.03
"""The ends of streams reach the pickers within this time after the last answer. Their CPU belongs to the
turn.
"""
_ACCOUNTS_S: Final = 0.25
"""After this time a picker has also done the work that it puts off, such as its account of misses."""
_SERVING: Final = frozenset(("envoy", "upstream", "client"))
"""The processes that serve in the turn of every variant."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: the requests, and the variants that they are sent through."""

    table: str
    prompt_kb: int
    chunks: int
    variants: tuple[VariantName, ...]
    endpoints: int = 4
    in_flight: int = 4
    scrapes_count: bool = False
    """True if the pickers scrape so much that the cost on a busy machine matters. The CPU without requests
    then comes from the turns of the same round in which other pickers served.
    """


@dataclass(frozen=True, slots=True)
class Lap:
    """One turn of one variant, with the CPU seconds of each process as they were measured."""

    requests: int
    seconds: float
    measured_s: float
    """The seconds over which the CPU was measured."""
    used_s: Mapping[str, float]
    first_bytes_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Turn:
    """The results of one variant in one round."""

    requests: int
    seconds: float
    cpu_s: Mapping[str, float]
    """CPU seconds of each process, without the CPU that it uses when there are no requests."""
    first_bytes_s: Sequence[float]

    def each_ms(self, process: Process) -> float:
        """Return the CPU milliseconds for each request."""
        return self.cpu_s[process] / self.requests * 1000


@dataclass(slots=True)
class CellResult:
    cell: Cell
    turns: dict[VariantName, list[Turn]] = field(default_factory=dict)
    """The turns of each variant, one for each round."""
    messages: dict[VariantName, float] = field(default_factory=dict)
    """The number of ext_proc messages that Envoy sent for each request, by variant."""


@dataclass(slots=True)
class Results:
    cells: list[CellResult] = field(default_factory=list)
    alone: dict[int, dict[VariantName, list[float]]] = field(default_factory=dict)
    """Seconds to the first byte with one request in flight, by size of prompt and variant."""
    idle_cores: dict[int, dict[str, float]] = field(default_factory=dict)
    """The share of a core that each process uses without requests, by number of endpoints."""


Report = Callable[[str], None]


class Bench:
    """Runs cells on a rig, one after the other."""

    def __init__(self, rig: Rig, *, rounds: int, turn_s: float, seed: int, report: Report) -> None:
        self._rig = rig
        self._rounds = rounds
        self._turn_s = turn_s
        self._rng = random.Random(seed)
        self._report = report
        self._meter = CpuMeter({str(name): pid for name, pid in rig.pids.items()})
        self._endpoints = 0
        self.results = Results()

    async def run(self, cell: Cell) -> None:
        await self._use_endpoints(cell.endpoints)
        result = CellResult(cell)
        prompts = self._prompts(cell)
        variants = [VARIANTS[name] for name in cell.variants]
        for variant in variants:
            await self._lap(variant, prompts, cell, seconds=_WARM_UP_S)
        before = {v.name: await self._rig.messages(v) for v in variants}
        for number in range(self._rounds):
            self._report(f"{_describe(cell)}, round {number + 1} of {self._rounds}")
            laps: dict[VariantName, Lap] = {}
            for variant in self._rng.sample(variants, len(variants)):
                laps[variant.name] = await self._lap(variant, prompts, cell, seconds=self._turn_s)
            for name, turn in turns_of(cell, laps, self.results.idle_cores[cell.endpoints]).items():
                result.turns.setdefault(name, []).append(turn)
        for variant in variants:
            requests = sum(turn.requests for turn in result.turns[variant.name])
            sent = await self._rig.messages(variant) - before[variant.name]
            result.messages[variant.name] = sent / requests
        self.results.cells.append(result)

    async def alone(self, prompt_kb: int, variants: Sequence[VariantName], *, requests: int) -> None:
        """Send one request at a time, with the variants in turn. This shows what each variant adds when no
        request waits for another.
        """
        await self._use_endpoints(4)
        self._report(f"{prompt_kb} KB prompts one at a time")
        cell = Cell("alone", prompt_kb, 1, tuple(variants))
        prompts = self._prompts(cell)
        clients = {name: Client(self._rig.ports[name]) for name in variants}
        took: dict[VariantName, list[float]] = {name: [] for name in variants}
        for number in range(requests + 3):
            for name in self._rng.sample(list(variants), len(variants)):
                seconds = await clients[name].one(prompts)
                if number >= 3:
                    took[name].append(seconds)
        for client in clients.values():
            client.close()
        self.results.alone[prompt_kb] = took

    async def _lap(self, variant: Variant, prompts: Prompts, cell: Cell, *, seconds: float) -> Lap:
        client = Client(self._rig.ports[variant.name])
        in_flight = min(cell.in_flight, 4) if variant.duplex else cell.in_flight
        self._meter.lap()
        burst = await client.burst(
            prompts,
            in_flight=in_flight,
            seconds=seconds,
            spread_s=_SPREAD_S if cell.chunks > 1 else 0.0,
        )
        client.close()
        after_s = _ACCOUNTS_S if cell.scrapes_count else _ENDS_S
        await asyncio.sleep(after_s)
        return Lap(
            requests=burst.requests,
            seconds=burst.seconds,
            measured_s=burst.seconds + after_s,
            used_s=self._meter.lap(),
            first_bytes_s=burst.first_bytes_s,
        )

    async def _use_endpoints(self, count: int) -> None:
        """Let all processes know `count` model servers, and measure the CPU that the processes then use
        without requests.
        """
        if count == self._endpoints:
            return
        self._endpoints = count
        self._report(f"{count} endpoints, no requests")
        await self._rig.set_endpoints(count)
        await asyncio.sleep(2.0)
        self._meter.lap()
        await asyncio.sleep(3.0)
        self.results.idle_cores[count] = {name: cpu / 3.0 for name, cpu in self._meter.lap().items()}

    def _prompts(self, cell: Cell) -> Prompts:
        return Prompts(
            size_bytes=cell.prompt_kb * 1024,
            chunks=cell.chunks,
            seed=self._rng.getrandbits(32),
        )


def _describe(cell: Cell) -> str:
    return f"{cell.table}: {cell.prompt_kb} KB prompts, {cell.chunks} chunks"


def turns_of(
    cell: Cell, laps: Mapping[VariantName, Lap], idle_cores: Mapping[str, float]
) -> dict[VariantName, Turn]:
    """Return the turns of one round, without the CPU that each process uses without requests. `idle_cores` is
    the share of a core that each process used while it served no requests.
    """
    if cell.scrapes_count:
        idle_cores = {name: _resting_cores(name, laps, idle=share) for name, share in idle_cores.items()}
    return {
        variant: Turn(
            requests=lap.requests,
            seconds=lap.seconds,
            cpu_s={
                name: max(0.0, used_s - idle_cores[name] * lap.measured_s)
                for name, used_s in lap.used_s.items()
            },
            first_bytes_s=lap.first_bytes_s,
        )
        for variant, lap in laps.items()
    }


def _resting_cores(process: str, laps: Mapping[VariantName, Lap], *, idle: float) -> float:
    """Return the share of a core that a picker used while other pickers served."""
    resting = [lap for name, lap in laps.items() if VARIANTS[name].picker != process]
    if process in _SERVING or not resting:
        return idle
    return sum(lap.used_s[process] for lap in resting) / sum(lap.measured_s for lap in resting)
