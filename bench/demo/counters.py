"""Reads the counters of the servers, and the picker's CPU time from the kernel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """One model server's totals since it started."""

    queried_tokens: float
    hit_tokens: float
    finished: float

    def since(self, before: ServerCounters) -> ServerCounters:
        return ServerCounters(
            self.queried_tokens - before.queried_tokens,
            self.hit_tokens - before.hit_tokens,
            self.finished - before.finished,
        )


def read_counters(page: str) -> ServerCounters:
    """Read the counters from a metrics page. Raise ValueError if a counter is missing, because 0 in its place
    would give a wrong figure.
    """
    return ServerCounters(
        queried_tokens=_total(page, "vllm:prefix_cache_queries_total"),
        hit_tokens=_total(page, "vllm:prefix_cache_hits_total"),
        finished=_total(page, "vllm:request_success_total"),
    )


def _total(page: str, name: str) -> float:
    """Return the sum over all label sets."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    if not values:
        raise ValueError(f"the metrics page has no {name}")
    return sum(values)


async def scrape(session: aiohttp.ClientSession, urls: Sequence[str]) -> list[ServerCounters]:
    found = []
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            response.raise_for_status()
            found.append(read_counters(await response.text()))
    return found


class CpuMeter:
    """Measures the CPU time of one process from a moment on, for all threads together, in nanoseconds (`stat`
    has steps of 10 ms). The time of threads that have ended is lost, but the picker's threads do not end.
    The result is nan if the kernel does not state the time.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._start_ns = self._by_thread_ns()

    def spent_s(self) -> float:
        now_ns = self._by_thread_ns()
        if not now_ns:
            return math.nan
        return sum(spent - self._start_ns.get(thread, 0) for thread, spent in now_ns.items()) / 1e9

    def _by_thread_ns(self) -> dict[str, int]:
        found = {}
        for file in self._tasks.glob("*/schedstat"):
            # A thread may end after it was listed and before it is read.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[file.parent.name] = int(file.read_text().split()[0])
        return found
