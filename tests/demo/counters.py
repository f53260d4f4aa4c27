"""What the parties say of themselves: the servers' own counters, and the picker's CPU time from the kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


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
    """From a metrics page. ValueError when a counter is missing: a zero nobody counted would be a wrong figure."""
    return ServerCounters(
        queried_tokens=_total(page, "vllm:prefix_cache_queries_total"),
        hit_tokens=_total(page, "vllm:prefix_cache_hits_total"),
        finished=_total(page, "vllm:request_success_total"),
    )


def _total(page: str, name: str) -> float:
    """Sum over all label sets."""
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


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads so far, in steps of a clock tick (10 ms)."""
    # The command's name stands in brackets and may hold spaces; what is counted from comes after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
