"""Judges whether the generator itself was the bottleneck, from CPU times and late wake-ups.
Pure.

A time in a load test's report is the server's time only if the generator could measure it. Two things show
that it could not: its process had no CPU time left (a Python process can use only one core), or its event
loop woke up late. The report and the console show `verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.load.samples import Samples

LOOK_S: Final = 0.05
"""How often the loop should wake up."""
_FULL_CORE: Final = 0.9
_BUSY_SHARE: Final = 0.1
_LEAST_TOLERANCE_S: Final = 0.020
_TOLERANCE_OF_TTFT: Final = 0.05
_LITTLE_CPU: Final = 0.5


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
        self.windows += other.windows
        self.full_windows += other.full_windows
        self.cpu_s += other.cpu_s
        self.waited_s += other.waited_s
        self.wall_s += other.wall_s
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
        return {
            "windows": self.windows,
            "full_windows": self.full_windows,
            "cpu_s": self.cpu_s,
            "waited_s": self.waited_s,
            "wall_s": self.wall_s,
            "lag_s": self.lag_s.document(),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Health:
        return cls(
            windows=document["windows"],
            full_windows=document["full_windows"],
            cpu_s=document["cpu_s"],
            waited_s=document["waited_s"],
            wall_s=document["wall_s"],
            lag_s=Samples.of(document["lag_s"]),
        )

    def check_integrity(self) -> None:
        assert 0 <= self.full_windows <= self.windows
        self.lag_s.check_integrity()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
