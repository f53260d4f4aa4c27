"""A request inside a simulated engine, its needs and its progress, and a stride of its steps.

Only the engine changes it. Times are seconds of the virtual clock. A time of None means that the request did
not reach this point.
"""

import math
from dataclasses import dataclass, field

from model_server.core.block_pool import Block
from model_server.core.hashing import BlockHash


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A request inside an engine."""

    job_id: int
    names: list[BlockHash]
    """The names of all full blocks of prompt and answer."""
    num_prompt_tokens: int
    num_answer_tokens: int
    adapter: str = ""
    arrived_s: float = 0.0
    num_tokens: int = 0
    """The number of tokens of the prompt and of the answer so far."""
    num_computed: int = 0
    num_named: int = 0
    """The number of the table's blocks that can be found by name."""
    table: list[Block] | None = None
    num_slots: int = 0
    """Number of tokens for which the table's blocks have room, while there is a table."""
    num_cached_tokens: int | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    num_preemptions: int = 0

    end_tokens: int = field(init=False)
    """The number of tokens of the prompt and of the whole answer."""

    def __post_init__(self) -> None:
        assert self.num_prompt_tokens > 0
        assert self.num_answer_tokens > 0
        self.num_tokens = self.num_prompt_tokens
        self.end_tokens = self.num_prompt_tokens + self.num_answer_tokens


@dataclass(slots=True)
class Stride:
    """`num_steps` steps with the same plan, in closed form. Each step takes a constant longer than the step
    before, since every answer grows by one token.
    """

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
