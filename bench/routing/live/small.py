"""Describes the fleet and the workloads of the comparison, which are small enough for two cores. Both sides
are made from this one description.

Workloads are the benchmark's own generators. Prompts have a quarter of their tokens, answers an eighth, and
pauses last a quarter. Caches, batches and speeds are a quarter, too. So misses and hits differ by as much as
at full size, while a request costs a laptop some milliseconds. The same seed gives both sides the same
requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from bench.routing.workloads import (
    ClosedLoop,
    OpenLoop,
    Timed,
    Turn,
    adapters,
    chat_sessions,
    hot_prefixes,
    no_sharing,
    shared_system_prompts,
)
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel
from model_server.sim.engine import EngineShape
from model_server.sim.prompts import Segment

NUM_SERVERS: Final = 4
ADAPTERS: Final = tuple(f"lora-{n}" for n in range(16))
SHAPE: Final = EngineShape(
    num_blocks=2560,
    block_tokens=16,
    limits=SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=512, max_loras=4),
    costs=CostModel(
        prefill_tokens_per_s=4000.0,
        context_knee_tokens=8192.0,
        decode_step_s=0.020,
        decode_per_request_s=0.0005,
        lora_load_s=0.25,
    ),
)
_PROMPT: Final = 1 / 4
_ANSWER: Final = 1 / 8
_THINKING: Final = 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """One workload. An open loop has `make` and a rate. A closed loop has `sessions` and users."""

    name: str
    make: Callable[[random.Random, int], Sequence[Timed]] | None = None
    sessions: Callable[[random.Random], Iterator[Sequence[Turn]]] | None = None
    rate_per_s: float = 0.0
    users: int = 0
    adapters: tuple[str, ...] = ()

    def workload(self, *, seed: int, seconds: float) -> OpenLoop | ClosedLoop:
        """Return arrivals for about this long. The same arguments always give the same arrivals."""
        rng = random.Random(f"{self.name} {seed}")
        if self.make is not None:
            timed = self.make(rng, max(8, round(self.rate_per_s * seconds)))
            return OpenLoop([_smaller(t) for t in timed], rate_per_s=self.rate_per_s)
        assert self.sessions is not None
        sessions = ([_smaller_turn(turn) for turn in session] for session in self.sessions(rng))
        return ClosedLoop(sessions, users=self.users, until_s=seconds, ramp_s=seconds / 4)


def server_flags(*, num_blocks: int = SHAPE.num_blocks) -> list[str]:
    """Return the flags that give a model server this shape."""
    limits, costs = SHAPE.limits, SHAPE.costs
    flags: Mapping[str, object] = {
        "block-size": SHAPE.block_tokens,
        "num-blocks": num_blocks,
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "max-loras": limits.max_loras,
        "prefill-tokens-per-s": costs.prefill_tokens_per_s,
        "context-knee-tokens": costs.context_knee_tokens,
        "decode-step-ms": 1000 * costs.decode_step_s,
        "decode-per-request-ms": 1000 * costs.decode_per_request_s,
        "interference": costs.interference,
        "lora-load-ms": 1000 * costs.lora_load_s,
        "speed": costs.speed,
        # The first token always comes alone, so there are fewer later events to pass on.
        "stream-interval": 8,
    }
    made = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    return [*made, *(part for name in ADAPTERS for part in ("--lora", name))]


def _tokens(count: int, share: float) -> int:
    return max(1, round(count * share))


def _segment(segment: Segment, share: float) -> Segment:
    return segment._replace(num_tokens=_tokens(segment.num_tokens, share))


def _smaller(timed: Timed) -> Timed:
    request = timed.request
    segments = tuple(_segment(segment, _PROMPT) for segment in request.segments)
    return replace(
        timed, request=replace(request, segments=segments, answer=_segment(request.answer, _ANSWER))
    )


def _smaller_turn(turn: Turn) -> Turn:
    return replace(
        turn,
        added_tokens=_tokens(turn.added_tokens, _PROMPT),
        answer_tokens=_tokens(turn.answer_tokens, _ANSWER),
        think_s=turn.think_s * _THINKING,
        system=turn.system and _segment(turn.system, _PROMPT),
    )


WORKLOADS: Final = {
    small.name: small
    for small in (
        Small(name="b2b", make=partial(shared_system_prompts, groups=32), rate_per_s=9.0),
        Small(name="hot", make=partial(hot_prefixes, prefixes=32), rate_per_s=9.0),
        Small(name="none", make=no_sharing, rate_per_s=9.0),
        Small(
            name="lora",
            make=partial(adapters, kinds=len(ADAPTERS)),
            rate_per_s=12.0,
            adapters=ADAPTERS,
        ),
        Small(name="chat", sessions=chat_sessions, users=48),
    )
}
