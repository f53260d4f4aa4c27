"""Computes several steps of the same plan at once, in closed form: when the n-th step ends, and which step
runs at a given time.

Each step takes a constant longer than the step before, since every answer grows by one token. Caller: the
engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from model_server.sim.job import Job


@dataclass(slots=True)
class Stride:
    """`num_steps` steps with the same plan."""

    chunks: list[tuple[Job, int]]
    started_s: float
    num_steps: int
    first_s: float
    """The duration of the first step. Each later step takes `growth_s` longer than the step before."""
    growth_s: float
    interruptible: bool
    """True if an arrival could be admitted at the next step."""

    def end_s(self, num_steps: int) -> float:
        return self.started_s + num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) / 2)

    def steps_until(self, now: float) -> int:
        """Return the fewest steps whose end is not before `now`."""
        left = max(0.0, now - self.started_s)
        if self.growth_s > 0:
            half = self.first_s - self.growth_s / 2
            steps = math.ceil((math.sqrt(half * half + 2 * self.growth_s * left) - half) / self.growth_s)
        else:
            steps = math.ceil(left / self.first_s)
        steps = max(1, min(steps, self.num_steps))
        while steps > 1 and self.end_s(steps - 1) >= now:  # rounding may have added or lost a step
            steps -= 1
        while steps < self.num_steps and self.end_s(steps) < now:
            steps += 1
        return steps
