"""Predicts which way to get a prefix's KV is the fastest: to compute it again, or to read all or a part of
it.

`Machine` and `Work` give the cost of a request on stated hardware. `Speeds` learns these costs from a running
server, which knows neither the bandwidth of its disk nor the speed of its processor. This module reads no
clock and gets times as numbers. The model adds up four times: the computation of the new tokens, the reading
of bytes from disk, a latency for each read, and a copy of all bytes that are used, wherever they were found.
With large tiers the copy takes most of the time. Reads ahead of the computation make the sum smaller.
docs/tiers.md says how near the model comes to the measured cells, and a test checks this.

Callers: the server's tiers (`Speeds`), tests and docs (the rest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_NEWEST_WEIGHT = 0.2
"""The weight of the newest measurement in a learned speed."""
_FEWEST_TOKENS = 32
"""Steps with fewer tokens all take about the same time, so they show nothing about the time of a token."""
_COMPUTED_BEFORE_TRIAL = 16
"""After this many prefixes were computed and not loaded, a prefix is loaded, to see whether loads have become
faster.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    flops_per_s: float
    weights_bytes_per_s: float
    """Every layer reads its weights at least once in a step."""
    disk_bytes_per_s: float
    read_s: float = 0.0
    """The time of each read besides its bytes."""
    copied_bytes_per_s: float = math.inf
    """The speed at which keys and values in memory are brought together for attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request: its computation, the bytes that it reads from disk for its prefix, and the bytes that it
    uses in all.
    """

    computed_tokens: int
    """The new tokens, plus the prefix's tokens if the prefix is computed again."""
    layers: int
    layer_weights: int
    disk_bytes: float = 0.0
    reads: float = 0.0
    used_bytes: float = 0.0
    """The bytes of the prefix's KV, from disk or from a fast tier."""

    def seconds(self, machine: Machine) -> float:
        flops = 2 * self.layer_weights * self.computed_tokens / machine.flops_per_s
        weights = 2 * self.layer_weights / machine.weights_bytes_per_s
        disk = self.disk_bytes / machine.disk_bytes_per_s + self.reads * machine.read_s
        return self.layers * max(flops, weights) + disk + self.used_bytes / machine.copied_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The bytes that a whole load of a prefix reads, by the place where they are."""

    disk_bytes: int
    held_bytes: int = 0
    """The bytes in the fast tiers."""


class Speeds:
    """The speeds of this server, learned while it runs. One thread computes and another thread loads. Each
    thread writes its own fields.
    """

    def __init__(self) -> None:
        self._compute_s_per_token: float | None = None
        self._disk_s_per_byte: float | None = None
        self._held_s_per_byte: float | None = None
        self._refused = 0

    def computed(self, *, tokens: int, seconds: float) -> None:
        if tokens >= _FEWEST_TOKENS:
            self._compute_s_per_token = _learnt(self._compute_s_per_token, seconds / tokens)

    def loaded(self, load: Load, *, seconds: float) -> None:
        """Learn from a load. The load shows the speed of the place from which most of its bytes came. The
        other place's share of the time is subtracted first.
        """
        if load.disk_bytes >= load.held_bytes:
            own_s = seconds - load.held_bytes * (self._held_s_per_byte or 0.0)
            if load.disk_bytes:
                self._disk_s_per_byte = _learnt(self._disk_s_per_byte, max(0.0, own_s) / load.disk_bytes)
        else:
            own_s = seconds - load.disk_bytes * (self._disk_s_per_byte or 0.0)
            self._held_s_per_byte = _learnt(self._held_s_per_byte, max(0.0, own_s) / load.held_bytes)

    def loading_is_faster(self, load: Load, *, tokens: int) -> bool:
        """Return whether loading the prefix should take less time than computing it. Unknown speeds are
        learned by loading.
        """
        load_s = self._load_s(load)
        if self._compute_s_per_token is None or load_s is None:
            return True
        if load_s <= tokens * self._compute_s_per_token:
            self._refused = 0
            return True
        self._refused += 1
        if self._refused > _COMPUTED_BEFORE_TRIAL:
            self._refused = 0
            return True
        return False

    def _load_s(self, load: Load) -> float | None:
        """Return predicted seconds. None means that the content comes from a place whose speed is not
        known.
        """
        known = (load.disk_bytes, self._disk_s_per_byte), (load.held_bytes, self._held_s_per_byte)
        wanted = [(num_bytes, speed) for num_bytes, speed in known if num_bytes]
        seconds = [num_bytes * speed for num_bytes, speed in wanted if speed is not None]
        return sum(seconds) if len(seconds) == len(wanted) else None


def _learnt(known: float | None, seen: float) -> float:
    return seen if known is None else (1 - _NEWEST_WEIGHT) * known + _NEWEST_WEIGHT * seen
