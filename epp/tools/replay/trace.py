"""Defines the input of a replay: requests in order of time, and the fleet that they went to. Pure values.

A prompt is a list of pieces. Equal pieces at the same place mean equal text up to their end. Made by
`reading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from epp.base.errors import ConfigError
from epp.config.policy import Policy


class Piece(NamedTuple):
    """A part of a prompt. `name` is a number of 64 bits that stands for its text and for all text before
    it.
    """

    name: int
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    at_s: float
    """Seconds since the first request."""
    pieces: tuple[Piece, ...]
    output_tokens: int
    adapter: str = ""
    tenant: str = ""
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    calls: Sequence[RecordedCall]
    servers: Sequence[RecordedServer]
    """Empty: the source does not say."""
    decode_step_s: float | None = None
    """Time for each token of an answer on a server that does little else, if sampled answers show it."""
    policy: Policy | None = None
    """The policy that routed at the end of the recording."""
    recorded: Figures | None = None
    """The figures of the recording itself."""
    remarks: tuple[str, ...] = ()
    """What the reader should know: what was left out, and what was estimated."""


class ReplayError(ConfigError):
    """The recording cannot be replayed; the message says where and why."""
