"""Lists the loads that are measured, and how often. The full run takes about seven minutes, and a quick run
takes less.
"""

from dataclasses import dataclass
from typing import Final

from bench.dataplane.measure import Cell
from bench.dataplane.rig import VariantName

_IN_FLIGHT: Final = {1: 4, 100: 16, 1000: 32}
"""The number of requests in flight, by the number of chunks. Long answers overlap, because otherwise a turn
would contain only a handful of requests.
"""

COLD: Final = "Cold: every prompt differs, 4 endpoints"
THOUSAND: Final = "Cold, 1,000 endpoints"
DUPLEX: Final = "FULL_DUPLEX_STREAMED both ways, 4 endpoints"


@dataclass(frozen=True, slots=True)
class Plan:
    cells: tuple[Cell, ...]
    alone_kb: tuple[int, ...]
    alone_requests: int
    rounds: int
    turn_s: float


def full_plan() -> Plan:
    ways: tuple[VariantName, ...] = ("direct", "envoy", "floor", "ours")
    duplex: tuple[VariantName, ...] = ("ours", "floor-duplex", "ours-duplex")
    cells = [_cell(COLD, kb, chunks, ways) for kb in (1, 40, 400) for chunks in (1, 100, 1000)]
    cells += [
        _cell(DUPLEX, kb, chunks, duplex) for kb, chunks in ((1, 1), (40, 1), (400, 1), (1, 100), (1, 1000))
    ]
    cells += [_A_THOUSAND]
    return Plan(tuple(cells), alone_kb=(1, 40, 400), alone_requests=200, rounds=5, turn_s=0.5)


def quick_plan() -> Plan:
    ways: tuple[VariantName, ...] = ("direct", "envoy", "floor", "ours")
    duplex: tuple[VariantName, ...] = ("floor-duplex", "ours-duplex")
    cells = [_cell(COLD, kb, 1, ways) for kb in (1, 40, 400)]
    cells += [_cell(COLD, 1, 100, ways), *(_cell(DUPLEX, 1, chunks, duplex) for chunks in (1, 1000))]
    return Plan(tuple(cells), alone_kb=(1,), alone_requests=100, rounds=5, turn_s=0.4)


def thousand_plan() -> Plan:
    """Return the plan that compares only 1,000 endpoints with 4."""
    return Plan((_A_THOUSAND,), alone_kb=(), alone_requests=0, rounds=40, turn_s=0.5)


def compare_plan() -> Plan:
    """Return the plan that compares only two pickers."""
    cells = [_cell(COLD, kb, 1, ("floor", "other", "ours")) for kb in (1, 40, 400)]
    return Plan(tuple(cells), alone_kb=(), alone_requests=0, rounds=15, turn_s=0.5)


def _cell(
    table: str,
    prompt_kb: int,
    chunks: int,
    variants: tuple[VariantName, ...],
    *,
    endpoints: int = 4,
    scrapes_count: bool = False,
) -> Cell:
    return Cell(
        table,
        prompt_kb,
        chunks,
        variants,
        endpoints=endpoints,
        in_flight=_IN_FLIGHT[chunks],
        scrapes_count=scrapes_count,
    )


_A_THOUSAND: Final = _cell(THOUSAND, 1, 1, ("few", "ours"), endpoints=1000, scrapes_count=True)
