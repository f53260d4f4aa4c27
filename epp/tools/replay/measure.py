"""Measures the requests of a run. Benches use the same functions."""

from __future__ import annotations

from collections.abc import Sequence

from model_server.sim.request import Record

WARM_UP_SHARE = 0.1
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
