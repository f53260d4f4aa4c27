"""Turns the records of a run into its row in the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from epp.tools.replay.simulate import WARM_UP_SHARE, quantile, tpot_s, ttft_s
from model_server.sim.fleet import Outcome
from model_server.sim.request import Record

GOOD_TTFT_S = 2.0
GOOD_TPOT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one run, or means over its seeds. Times are in seconds."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p90_s: float
    hit_ratio: float
    """Cached prompt tokens divided by prompt tokens, for admitted requests."""
    completed: float
    good: float
    """Share of all requests that were answered within GOOD_TTFT_S and with GOOD_TPOT_S a token."""
    load_cov: float
    adapter_loads: float
    """The number for each 1,000 requests."""
    requests: float
    ended_programs: float = 0.0
    program_mean_s: float = 0.0
    program_p99_s: float = 0.0


def row_of(outcome: Outcome, *, programs_s: Sequence[float] = ()) -> Row:
    """Return the figures of a run. A request without a first token counts with its wait until the run's
    end, so that waiting never looks short. programs_s: the seconds of each session that ended.
    """
    ordered = sorted(outcome.records, key=lambda r: (r.arrived_s, r.request.request_id))
    records = ordered[int(WARM_UP_SHARE * len(ordered)) :]
    ttft = sorted(ttft_s(record, outcome.ended_s) for record in records)
    tpot = sorted(t for t in map(tpot_s, records) if t is not None)
    seen = [r for r in records if r.num_cached_tokens is not None]
    prompt = sum(r.num_prompt_tokens for r in seen)
    return Row(
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_p90_s=quantile(tpot, 0.9),
        hit_ratio=sum(r.num_cached_tokens or 0 for r in seen) / prompt if prompt else 0.0,
        completed=sum(r.completed for r in records) / len(records),
        good=sum(map(is_good, records)) / len(records),
        load_cov=outcome.load_cov,
        adapter_loads=1000 * outcome.adapter_loads / len(ordered),
        requests=len(ordered),
        ended_programs=len(programs_s),
        program_mean_s=fmean(programs_s or (0.0,)),
        program_p99_s=quantile(sorted(programs_s), 0.99),
    )


def mean_row(rows: Sequence[Row]) -> Row:
    return Row(**{name: fmean(getattr(row, name) for row in rows) for name in Row.__slots__})


def spread(rows: Sequence[Row], name: str) -> float:
    """Return the largest value of one figure over the seeds, minus the smallest."""
    values: list[float] = [getattr(row, name) for row in rows]
    return max(values) - min(values)


def is_good(record: Record) -> bool:
    if not record.completed or record.first_token_s is None:
        return False
    tpot = tpot_s(record)
    return record.first_token_s - record.arrived_s <= GOOD_TTFT_S and (tpot is None or tpot <= GOOD_TPOT_S)
