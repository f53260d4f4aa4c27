"""A request inside a simulated engine: its needs and its progress.

Only the engine changes it. Times are seconds of the virtual clock. A time of None means that the request did
not reach this point.
"""

from __future__ import annotations

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
    scheduled_s: float | None = None
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
