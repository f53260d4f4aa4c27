"""Holds the figures of one run: histograms of each measure, the health of the generator, counts, and failures
by class. The figures are plain data that can be added up over processes.

A time in a load test's report is the server's time only if the generator could measure it. Two things show
that it could not: its process had no CPU time left (a Python process can use only one core), or its event
loop woke up late. The report and the console show `verdict`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_STEP: Final = math.log(1.01)
_LEAST: Final = 1e-6


class Samples:
    """Counts in buckets of one percent. Sum, least and largest value are exact."""

    __slots__ = ("_buckets", "count", "least", "most", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = -math.inf
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        bucket = round(math.log(max(_LEAST, value)) / _STEP)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def merge(self, other: Samples) -> None:
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        """Return the mean, or nan if there are no values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return the least value that a `share` of all values do not exceed. Without values it is nan."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        for value, below in self.curve():
            if below * self.count >= rank - 0.5:
                return value
        return self.most

    def curve(self) -> list[tuple[float, float]]:
        """Return pairs (value, share of all values that do not exceed it), in ascending order."""
        points = []
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            value = math.exp(bucket * _STEP)
            points.append((min(max(value, self.least), self.most), seen / self.count))
        if points:
            points[-1] = (self.most, 1.0)
        return points

    def document(self) -> dict[str, Any]:
        """Return the samples for JSON, and for locust's messages between its processes."""
        if not self.count:
            return {}
        return {
            "count": self.count,
            "total": self.total,
            "least": self.least,
            "most": self.most,
            "buckets": [[bucket, self._buckets[bucket]] for bucket in sorted(self._buckets)],
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Samples:
        made = cls()
        if document:
            made._buckets = {int(bucket): int(count) for bucket, count in document["buckets"]}
            made.count = document["count"]
            made.total = document["total"]
            made.least = document["least"]
            made.most = document["most"]
        return made

    def check_integrity(self) -> None:
        assert self.count == sum(self._buckets.values())
        assert all(count > 0 for count in self._buckets.values())
        assert self.count == 0 or self.least <= self.mean * (1 + 1e-9) <= self.most * (1 + 2e-9)


LOOK_S: Final = 0.05
"""How often the loop should wake up."""
_FULL_CORE: Final = 0.9
_BUSY_SHARE: Final = 0.1
_LEAST_TOLERANCE_S: Final = 0.020
_TOLERANCE_OF_TTFT: Final = 0.05
_LITTLE_CPU: Final = 0.5
_OF_HEALTH: Final = ("windows", "full_windows", "cpu_s", "waited_s", "wall_s")
"""The fields of `Health` that add up."""


@dataclass(slots=True)
class Health:
    """The health of one process of the generator, or of several together."""

    windows: int = 0
    full_windows: int = 0
    """Seconds in which the process used more than nine tenths of a core."""
    cpu_s: float = 0.0
    waited_s: float = 0.0
    """Seconds in which the process was ready to run and another program had the core."""
    wall_s: float = 0.0
    lag_s: Samples = field(default_factory=Samples)

    def note_window(self, *, wall_s: float, cpu_s: float, waited_s: float) -> None:
        """Add the times of about one second of the process's life."""
        self.windows += 1
        self.full_windows += cpu_s > _FULL_CORE * wall_s
        self.cpu_s += cpu_s
        self.waited_s += waited_s
        self.wall_s += wall_s

    def note_wake(self, *, late_s: float) -> None:
        """Add a late wake-up. The wake-ups that the loop missed while it stood still would have been late
        too, so they count.
        """
        while late_s > 0:
            self.lag_s.add(late_s)
            late_s -= LOOK_S
            if late_s <= 0:
                return
        self.lag_s.add(0.0)

    def merge(self, other: Health) -> None:
        for name in _OF_HEALTH:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lag_s.merge(other.lag_s)

    def verdict(self, *, median_ttft_s: float) -> list[str]:
        """Return the reasons why the figures are not the server's alone. The list is empty if the generator
        added nothing to them. `median_ttft_s` is nan if no answer came.
        """
        tolerance_s = _LEAST_TOLERANCE_S
        if not math.isnan(median_ttft_s):
            tolerance_s = max(tolerance_s, _TOLERANCE_OF_TTFT * median_ttft_s)
        found = []
        if self.windows and self.full_windows > _BUSY_SHARE * self.windows:
            found.append(
                f"it used a whole core in {self.full_windows} of {self.windows} seconds: use more processes (--processes N), or send less"
            )
        if self.lag_s.quantile(0.99) > tolerance_s:
            found.append(
                f"its event loop woke up late (p99 {_ms(self.lag_s.quantile(0.99))}, most {_ms(self.lag_s.most)}): "
                f"measured times may be too long by as much; {self._whose_fault()}"
            )
        return found

    def _whose_fault(self) -> str:
        if self.cpu_s < _LITTLE_CPU * self.wall_s:
            waited = self.waited_s / self.wall_s
            return (
                f"it used little CPU itself, but waited {waited:.0%} of the time for a core that other programs used: "
                "run it on a machine of its own"
            )
        return "use more processes (--processes N), or send less"

    def summary(self) -> str:
        """Return one line of figures."""
        if not self.wall_s:
            return "not watched: the run was too short"
        return (
            f"CPU {self.cpu_s / self.wall_s:.0%} of a core, waited for a core "
            f"{self.waited_s / self.wall_s:.0%} of the time, loop late p99 {_ms(self.lag_s.quantile(0.99))}"
        )

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_HEALTH} | {"lag_s": self.lag_s.document()}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Health:
        return cls(**{name: document[name] for name in _OF_HEALTH}, lag_s=Samples.of(document["lag_s"]))

    def check_integrity(self) -> None:
        assert 0 <= self.full_windows <= self.windows
        self.lag_s.check_integrity()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


MEASURES: Final = ("ttft_s", "inter_token_s", "longest_gap_s", "answer_s", "tokens_per_s")
_EXAMPLES: Final = 3
_COUNTS: Final = ("asked", "answered", "prompt_tokens", "cached_tokens", "output_tokens", "uncounted")
"""The fields of `Figures` that add up."""


@dataclass(slots=True)
class Figures:
    """The figures of one scenario in one run."""

    asked: int = 0
    answered: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    uncounted: int = 0
    """Answers without usage. Their events count as tokens."""
    first_at: float = math.inf
    last_at: float = -math.inf
    """The time when the last answer ended. `first_at` is the time when the first request was sent. Both are
    times of the machine's monotonic clock, which its processes share.
    """
    measures: dict[str, Samples] = field(default_factory=lambda: {name: Samples() for name in MEASURES})
    health: Health = field(default_factory=Health)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def unfinished(self) -> int:
        """Return the number of requests that were sent and not answered when the run ended."""
        return self.asked - self.answered - self.failed

    @property
    def duration_s(self) -> float:
        return max(0.0, self.last_at - self.first_at) if self.asked else 0.0

    @property
    def verdict(self) -> list[str]:
        """Return the reasons why the generator was the bottleneck. The list is empty if the generator was
        fast enough.
        """
        return self.health.verdict(median_ttft_s=self.measures["ttft_s"].quantile(0.5))

    def fail(self, kind: str, detail: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _EXAMPLES and detail not in examples:
            examples.append(detail)

    def merge(self, other: Figures) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + count
            known = self.examples.setdefault(kind, [])
            known += [text for text in other.examples.get(kind, []) if text not in known][
                : _EXAMPLES - len(known)
            ]
        self.first_at = min(self.first_at, other.first_at)
        self.last_at = max(self.last_at, other.last_at)
        for name, samples in other.measures.items():
            self.measures[name].merge(samples)
        self.health.merge(other.health)

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS} | {
            "failures": self.failures,
            "examples": self.examples,
            "first_at": self.first_at if self.asked else None,
            "last_at": self.last_at if math.isfinite(self.last_at) else None,
            "measures": {name: samples.document() for name, samples in self.measures.items()},
            "health": self.health.document(),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Figures:
        return cls(
            **{name: document[name] for name in _COUNTS},
            failures=dict(document["failures"]),
            examples={kind: list(texts) for kind, texts in document["examples"].items()},
            first_at=math.inf if document["first_at"] is None else document["first_at"],
            last_at=-math.inf if document["last_at"] is None else document["last_at"],
            measures={name: Samples.of(samples) for name, samples in document["measures"].items()},
            health=Health.of(document["health"]),
        )

    def check_integrity(self) -> None:
        assert self.unfinished >= 0
        assert self.measures["ttft_s"].count == self.answered
        self.health.check_integrity()
        for samples in self.measures.values():
            samples.check_integrity()


def together(parts: Iterable[Figures]) -> Figures:
    """Return the sum over several processes or several scenarios."""
    whole = Figures()
    for part in parts:
        whole.merge(part)
    return whole


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: its options, and the figures of each scenario. The report is made from this."""

    label: str
    settings: Mapping[str, Any]
    figures: Figures

    def write(self, file: Path) -> None:
        document = {"label": self.label, "settings": self.settings, "figures": self.figures.document()}
        file.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> RunRecord:
        document = json.loads(file.read_text())
        return cls(document["label"], document["settings"], Figures.of(document["figures"]))
