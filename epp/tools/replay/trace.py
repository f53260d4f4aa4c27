"""Defines the input of a replay: requests in order of time, and the fleet that they went to. Measures the
requests of a run, for the benches too. Pure. Made by `reading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Self

from epp.base.errors import ConfigError
from epp.config.policy import Policy
from model_server.sim.request import Record, SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedServer:
    name: str
    capacity_tokens: int
    prefill_tokens_per_s: float


UNSTATED: Final = RecordedServer(name="server", capacity_tokens=512_000, prefill_tokens_per_s=8000.0)
"""A simulated server of which the source states nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one policy. Times are seconds. None: not known."""

    hit_ratio: float
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    counted: int
    """Number of requests in these figures."""
    failed: int
    by_server: dict[str, int]
    """All requests, by the server that got them."""

    @classmethod
    def of(cls, ttfts: Sequence[float], tpots: Sequence[float], **counts: Any) -> Self:
        """Return the figures of times in ascending order, and of `counts`, the other fields."""
        return cls(
            ttft_mean_s=fmean(ttfts) if ttfts else None,
            ttft_p50_s=quantile(ttfts, 0.5) if ttfts else None,
            ttft_p90_s=quantile(ttfts, 0.9) if ttfts else None,
            ttft_p99_s=quantile(ttfts, 0.99) if ttfts else None,
            tpot_p50_s=quantile(tpots, 0.5) if tpots else None,
            tpot_p90_s=quantile(tpots, 0.9) if tpots else None,
            **counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    calls: Sequence[tuple[float, SimRequest]]
    """Requests in order of time, each with the seconds since the first one."""
    servers: Sequence[RecordedServer]
    """Empty: the source does not say."""
    bytes_per_token: float = 4.0
    decode_step_s: float | None = None
    """Time for each token of an answer on a calm server, if sampled answers show it."""
    policy: Policy | None = None
    """The policy that routed at the end of the recording."""
    recorded: Figures | None = None
    """The figures of the recording itself."""
    remarks: tuple[str, ...] = ()
    """What the reader should know: what was left out, and what was estimated."""


class ReplayError(ConfigError):
    """The recording cannot be replayed; the message says where and why."""


# -- what is measured ----------------------------------------------------------------------------------------

WARM_UP_SHARE: Final = 0.1
"""The first arrivals meet cold caches everywhere, so this share of them is left out."""


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def ttft_s(record: Record, ended_s: float) -> float:
    return (record.first_token_s if record.first_token_s is not None else ended_s) - record.arrived_s


def tpot_s(record: Record) -> float | None:
    tokens = record.request.answer.num_tokens
    if not record.completed or tokens < 2 or record.first_token_s is None or record.ended_s is None:
        return None
    return (record.ended_s - record.first_token_s) / (tokens - 1)
