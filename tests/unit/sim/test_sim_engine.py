"""The simulated engine is compared with the real engine and with its own invariants."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.core.engine import Engine, EngineConfig
from model_server.core.hashing import BlockHash
from model_server.core.request import Adapter, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner
from model_server.sim.engine import EngineShape, SimEngine
from model_server.sim.job import Job

BLOCK = 8
EOS = TokenId(1)


class TwinRequest:
    """A request for both engines: the same token ids, with its answer."""

    def __init__(
        self, number: int, *, at_s: float, prompt: list[int], answer_tokens: int, adapter: str
    ) -> None:
        self.number = number
        self.at_s = at_s
        self.prompt = prompt
        self.adapter = adapter
        self.answer = [TokenId(1_000_000 + number * 10_000 + n) for n in range(answer_tokens)]

    def names(self) -> list[BlockHash]:
        """Return names of the blocks. Any names will do as long as equal prefixes have equal names."""
        tokens = [*self.prompt, *self.answer]
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [BlockHash(repr((self.adapter, tokens[:end])).encode()) for end in ends]


def arrivals(rng: random.Random, *, count: int, mean_gap_s: float, adapters: int) -> list[TwinRequest]:
    prefixes = [[p * 1000 + n for n in range(rng.randrange(4, 60))] for p in range(2, 6)]
    now = 0.0
    made: list[TwinRequest] = []
    for number in range(count):
        now += rng.expovariate(1 / mean_gap_s)
        own = [500_000 + number * 100 + n for n in range(rng.randrange(1, 50))]
        prompt = rng.choice(prefixes) + own
        if made and rng.random() < 0.3:
            earlier = rng.choice(made)
            prompt = earlier.prompt + [int(t) for t in earlier.answer] + own
        adapter = f"lora-{rng.randrange(adapters)}" if adapters and rng.random() < 0.7 else ""
        made.append(
            TwinRequest(
                number, at_s=now, prompt=prompt[:180], answer_tokens=rng.randrange(1, 40), adapter=adapter
            )
        )
    return made


Seen = dict[int, tuple[int | None, float | None, float | None, int]]
"""By request: cached tokens, time of the first and of the last token, preemptions."""


def run_core(work: list[TwinRequest], shape: EngineShape) -> Seen:
    by_id = {str(a.number): a for a in work}

    def next_token(request: Request) -> TokenId:
        return by_id[request.request_id].answer[request.num_output_tokens]

    runner = CostRunner(shape.costs, max_loras=shape.limits.max_loras, next_token=next_token)
    config = EngineConfig(
        num_blocks=shape.num_blocks, block_size_tokens=BLOCK, eos_token_id=EOS, limits=shape.limits
    )
    engine = Engine(config, runner)
    requests: list[Request] = []
    todo, now = list(work), 0.0
    while todo or engine.num_unfinished:
        if not engine.num_unfinished:
            now = max(now, todo[0].at_s)
        while todo and todo[0].at_s <= now:
            arrival = todo.pop(0)
            request = Request(
                request_id=RequestId(str(arrival.number)),
                token_ids=[TokenId(t) for t in arrival.prompt],
                max_tokens=len(arrival.answer),
                arrival_s=arrival.at_s,
                adapter=Adapter(arrival.adapter, "") if arrival.adapter else None,
                ignore_eos=True,
            )
            requests.append(request)
            engine.add(request)
        _, now = engine.step(now=now)
    return {
        int(r.request_id): (r.num_cached_tokens, r.first_token_s, r.last_token_s, r.num_preemptions)
        for r in requests
    }


def run_sim(work: list[TwinRequest], shape: EngineShape, *, checked: bool = False) -> Seen:
    engine = SimEngine(shape)
    jobs: list[Job] = []
    todo = list(work)
    while todo or engine.due_s < math.inf:
        if todo and todo[0].at_s <= engine.due_s:
            arrival = todo.pop(0)
            job = Job(
                job_id=arrival.number,
                names=arrival.names(),
                num_prompt_tokens=len(arrival.prompt),
                num_answer_tokens=len(arrival.answer),
                adapter=arrival.adapter,
            )
            jobs.append(job)
            engine.add(job, now=arrival.at_s)
        else:
            engine.wake(engine.due_s)
        if checked and not (engine.num_waiting and engine.num_running == 0):
            engine.check_integrity()
    return {j.job_id: (j.num_cached_tokens, j.first_token_s, j.ended_s, j.num_preemptions) for j in jobs}


def shape_of(*, num_blocks: int, max_num_seqs: int, budget: int, max_loras: int = 2) -> EngineShape:
    return EngineShape(
        num_blocks=num_blocks,
        block_tokens=BLOCK,
        limits=SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_loras=max_loras),
        costs=CostModel(prefill_tokens_per_s=2000, decode_per_context_token_s=1e-5, lora_load_s=0.03),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([30, 40, 80, 400]),
    max_num_seqs=st.sampled_from([2, 5, 16]),
    budget=st.sampled_from([17, 64, 2048]),
    mean_gap_s=st.sampled_from([0.01, 0.1, 0.5]),
    adapters=st.sampled_from([0, 5]),
)
def test_hits_and_times_equal_those_of_the_real_engine(
    *, seed: int, num_blocks: int, max_num_seqs: int, budget: int, mean_gap_s: float, adapters: int
) -> None:
    work = arrivals(random.Random(seed), count=40, mean_gap_s=mean_gap_s, adapters=adapters)
    shape = shape_of(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
    real, simulated = run_core(work, shape), run_sim(work, shape)
    assert simulated.keys() == real.keys()
    for number, (cached, first_s, last_s, preemptions) in real.items():
        mine = simulated[number]
        assert (mine[0], mine[3]) == (cached, preemptions), f"request {number}"
        assert mine[1] == pytest.approx(first_s, rel=1e-9)
        assert mine[2] == pytest.approx(last_s, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([30, 80]))
def test_invariants_hold_after_each_event(seed: int, num_blocks: int) -> None:
    work = arrivals(random.Random(seed), count=30, mean_gap_s=0.05, adapters=3)
    run_sim(work, shape_of(num_blocks=num_blocks, max_num_seqs=4, budget=64), checked=True)
