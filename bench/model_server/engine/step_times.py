"""Measures how long one step of the model takes: prefill by length and context, decoding by batch and
context, and both together. The simulator's costs come from these times. The content of the cache is whatever
the memory holds, since times do not depend on it. The command calls this module.
"""

from dataclasses import dataclass

from bench.model_server.engine import runs
from bench.model_server.engine.runs import BLOCK_TOKENS, Bench, Figures, Kept, Say
from model_server.core.blocks import Block, BlockId
from model_server.core.request import TokenId
from model_server.core.scheduler import Chunk, StepPlan

_TIMED = 5


@dataclass(frozen=True, slots=True)
class Step:
    """A step computes `prompt` tokens of one prompt, and one token for each of `batch` other requests. Each
    request has `context` tokens before these.
    """

    prompt: int
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"steps {self.prompt} {self.batch} {self.context}"


WHOLE = (
    *(Step(tokens, 0, context) for context in (0, 2048, 4096) for tokens in (128, 512, 2048)),
    *(Step(0, batch, context) for context in (512, 2000) for batch in (1, 8, 32, 64)),
    *(Step(512, batch, 1024) for batch in (8, 32)),
)
SMALL = (Step(64, 0, 0), Step(64, 0, 64), Step(0, 1, 64), Step(0, 4, 64), Step(64, 4, 64))


def step_times(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure each step several times in every repeat, after one step that is not counted."""
    steps = WHOLE if bench.whole else SMALL
    for _ in range(repeats):
        for step in steps:
            plan = _plan(step)
            times = [_seconds(bench, plan) for _ in range(1 + _TIMED)][1:]
            kept.add(step.name, sorted(times)[_TIMED // 2])
            say(f"{step}: {1000 * kept.series[step.name][-1]:.2f} ms")
    rows = [
        {
            "prompt tokens": step.prompt,
            "decoding requests": step.batch,
            "context of each": step.context,
            "ms": 1000 * kept.median(step.name),
        }
        for step in steps
    ]
    goal = "none: the times that the cost model needs; on a GPU by FlashAttention, decoding by CUDA graphs"
    return {"row": "step-times", "goal": goal, "rows": rows}


def _seconds(bench: Bench, plan: StepPlan) -> float:
    started = bench.now_s()
    bench.model.forward(plan)
    return bench.now_s() - started


def _plan(step: Step) -> StepPlan:
    sizes = [step.prompt] * (step.prompt > 0) + [1] * step.batch
    chunks, taken = [], 0
    for number, size in enumerate(sizes):
        end = step.context + size
        blocks = -(-end // BLOCK_TOKENS)
        table = [Block(BlockId(block)) for block in range(taken, taken + blocks)]
        taken += blocks
        request = runs.request(str(number), [TokenId(7)] * end, max_tokens=1)
        chunks.append(Chunk(request, step.context, size, True, table))
    return StepPlan(tuple(chunks))
