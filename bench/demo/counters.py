"""Reads the counters of the servers, and the CPU time of the picker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from bench.dataplane.cpu import cpu_s


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


def cpu_spent_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, or nan if the process has ended."""
    try:
        return cpu_s(pid)
    except OSError:
        return math.nan
