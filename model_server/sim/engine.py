"""A simulated engine: the core's scheduling and block pool without tokens, fast enough for hours of traffic.

The simulated engine behaves like `core.engine.Engine` with the cost runner. It has the same block pool (the
core's own), the same rules for chunks, admission and preemption, and the same durations. Differential tests
check this. The simulated engine has no tokens: a request brings the names of its blocks, and the length of an
answer is known.

While all requests only decode, many steps are computed as one stride in closed form, until a request ends or
needs a block. A request that arrives ends the stride at the end of the current step, because the real engine
would look at its queue then.

Call `add` at any time. Call `wake(now)` at `due_s`, which records the computed work and starts the next step
or stride. `add` may move `due_s` to an earlier time. Caller: the fleet.

Invariants (`check_integrity`): those of the core's scheduler, and at most one stride at a time.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace

from model_server.core.block_pool import Block, BlockPool
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, ResidentAdapters
from model_server.sim.job import Job, Stride


@dataclass(slots=True)
class Counters:
    """The counters that a real server would show, since its start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    finished: int = 0
    ttft_sum_s: float = 0.0
    ttft_count: int = 0
    adapter_loads: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Sizes and speed of one simulated server."""

    num_blocks: int = 1000
    block_tokens: int = 512
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    costs: CostModel = field(default_factory=CostModel)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


class SimEngine:
    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks)
        self.counters = Counters()
        self.due_s = math.inf
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stride: Stride | None = None
        self._resident = ResidentAdapters()
        self._no_room = False
        """The first request in the queue found too few blocks. Nothing behind it is admitted before a request
        ends.
        """

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def active_adapters(self) -> frozenset[str]:
        return frozenset(job.adapter for job in self.jobs() if job.adapter)

    def generated_tokens(self, *, now: float) -> int:
        """Return all answer tokens by now, including those of the current stride, since a server counts at
        every step.
        """
        counted, stride = self.counters.generated_tokens, self._stride
        if stride is None or stride.num_steps == 1:
            return counted
        steps = stride.steps_until(now)
        return counted + (steps if stride.end_s(steps) <= now else steps - 1) * len(stride.chunks)

    def jobs(self) -> list[Job]:
        """Return the running requests in order of admission, then the waiting requests in the order of the
        queue.
        """
        return [*self._running, *self._waiting]

    def fits(self, job: Job) -> bool:
        """Return whether the request could ever run here."""
        return job.end_tokens <= self.shape.capacity_tokens

    def add(self, job: Job, *, now: float) -> None:
        """Queue a request. This may move `due_s`: an idle engine has to be woken now, and an engine in a
        stride of several steps at the end of its current step.
        """
        assert self.fits(job), "the request could never run"
        job.arrived_s = now
        self._waiting.append(job)
        stride = self._stride
        if stride is None:
            self.due_s = now
        elif stride.interruptible and stride.num_steps > 1:
            stride.num_steps = stride.steps_until(now)
            self.due_s = stride.end_s(stride.num_steps)

    def drop_all(self) -> list[Job]:
        """Fail all requests of the engine, because its process died. The engine cannot be used afterwards."""
        lost = self.jobs()
        self._running.clear()
        self._waiting.clear()
        self._stride, self.due_s = None, math.inf
        return lost

    def wake(self, now: float) -> tuple[list[Job], list[Job]]:
        """Record the work of the stride that ends now, if there is one. Start the next stride. Return the
        requests that got their first token, and the requests that ended.
        """
        first: list[Job] = []
        ended: list[Job] = []
        if self._stride is not None:
            first, ended = self._finish(self._stride, now)
            self._stride = None
        self._begin(now)
        return first, ended

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = sum(len(job.table or ()) for job in self._running)
        assert held == sum(block.ref_count for block in self.pool.blocks)
        assert all(job.table is None and job.num_computed == 0 for job in self._waiting)
        assert all(job.num_slots == len(job.table or ()) * self.shape.block_tokens for job in self._running)
        assert len(self._running) <= self.shape.limits.max_num_seqs
        assert len({j.adapter for j in self._running if j.adapter}) <= self.shape.limits.max_loras
        assert (self._stride is None) == (not self._running)

    # -- recording computed work -----------------------------------------------------------------------------

    def _finish(self, stride: Stride, now: float) -> tuple[list[Job], list[Job]]:
        first: list[Job] = []
        ended: list[Job] = []
        steps = stride.num_steps
        for job, num_tokens in stride.chunks:
            job.num_computed += num_tokens if steps == 1 else steps
            if job.num_computed < job.num_tokens:
                continue
            job.num_tokens = job.num_computed + 1
            self.counters.generated_tokens += steps
            if job.first_token_s is None:
                job.first_token_s = now
                self._count_first(job, now)
                first.append(job)
            if job.num_tokens >= job.end_tokens:
                ended.append(job)
        for job in ended:
            job.ended_s = now
            self.counters.finished += 1
            self._running.remove(job)
            self._free(job)
        return first, ended

    def _count_first(self, job: Job, now: float) -> None:
        counters = self.counters
        counters.prompt_tokens += job.num_prompt_tokens
        counters.cached_prompt_tokens += job.num_cached_tokens or 0
        counters.ttft_sum_s += now - job.arrived_s
        counters.ttft_count += 1

    # -- planning --------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        budget = self.shape.limits.max_num_batched_tokens
        chunks, left, preempted = self._continue_running(budget)
        running = len(chunks)
        self._no_room = False
        if not preempted:
            self._admit(chunks, left)
        if not chunks:
            assert not self._running, "requests wait and nothing can run"
            self.due_s = math.inf
            return
        costs = self.shape.costs
        loads = self._resident.use((job.adapter for job, _ in chunks), most=self.shape.limits.max_loras)
        self.counters.adapter_loads += loads
        load_s = loads * costs.lora_load_s
        step_s = costs.step_s((job.num_computed, num_tokens) for job, num_tokens in chunks)
        num_decoding = sum(num_tokens == 1 for _, num_tokens in chunks)
        num_steps = 1
        if not load_s and not preempted and running == len(chunks) == len(self._running):
            num_steps = self._num_stride_steps(chunks)
        stride = self._stride = Stride(
            chunks=chunks,
            started_s=now,
            num_steps=num_steps,
            first_s=(step_s + load_s) / costs.speed,
            growth_s=costs.decode_per_context_token_s * num_decoding / costs.speed,
            interruptible=not self._no_room and len(self._running) < self.shape.limits.max_num_seqs,
        )
        self.due_s = stride.end_s(num_steps)

    def _num_stride_steps(self, chunks: list[tuple[Job, int]]) -> int:
        """Return the number of steps until a request ends or needs a block. Return 1 if not all requests
        decode.
        """
        least = 1 << 30
        for job, num_tokens in chunks:
            computed = job.num_computed
            if num_tokens != 1 or computed + 1 != job.num_tokens or job.first_token_s is None:
                # A chunk may be a prompt's last token alone, and the step must end when the answer's first
                # token comes.
                return 1
            # The step that fills a block must be the first of a stride, because the block can be found from
            # the step's start on.
            slots = job.num_slots - computed - 1
            least = min(least, slots)
            left = job.end_tokens - job.num_tokens
            least = min(least, left)
            if least <= 1:
                return 1
        return least

    def _continue_running(self, budget: int) -> tuple[list[tuple[Job, int]], int, bool]:
        chunks: list[tuple[Job, int]] = []
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            job = self._running[index]
            num_tokens = job.num_tokens - job.num_computed
            num_tokens = min(num_tokens, budget)
            # This is the fast path: most steps neither need a new block nor fill one.
            if job.num_computed + num_tokens < job.num_slots:
                chunks.append((job, num_tokens))
                budget -= num_tokens
                index += 1
                continue
            while not self._append(job, num_tokens):
                victim = self._running.pop()
                self._preempt(victim)
                preempted = True
                if victim is job:
                    return chunks, budget, preempted
            chunks.append((job, num_tokens))
            budget -= num_tokens
            index += 1
        return chunks, budget, preempted

    def _preempt(self, job: Job) -> None:
        self._free(job)
        job.num_computed = 0
        job.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(job)

    def _admit(self, chunks: list[tuple[Job, int]], budget: int) -> None:
        limits = self.shape.limits
        skipped: list[Job] = []
        adapters = {job.adapter for job in self._running if job.adapter}
        while self._waiting and budget > 0 and len(self._running) < limits.max_num_seqs:
            job = self._waiting[0]
            if job.adapter and job.adapter not in adapters and len(adapters) >= limits.max_loras:
                skipped.append(self._waiting.popleft())
                continue
            num_tokens = self._try_admit(job, budget)
            if not num_tokens:
                self._no_room = True
                break
            self._waiting.popleft()
            chunks.append((job, num_tokens))
            budget -= num_tokens
            if job.adapter:
                adapters.add(job.adapter)
        self._waiting.extendleft(reversed(skipped))

    def _try_admit(self, job: Job, budget: int) -> int:
        """Return how many tokens the request computes in this step. 0 means that there is no room for the
        request.
        """
        size, pool = self.shape.block_tokens, self.pool
        usable = (job.num_tokens - 1) // size
        hits: list[Block] = []
        for name in job.names[:usable]:
            block = pool.find(name)
            if block is None:
                break
            hits.append(block)
        num_hit_tokens = len(hits) * size
        num_tokens = min(job.num_tokens - num_hit_tokens, budget)
        num_new = -(-(num_hit_tokens + num_tokens) // size) - len(hits)
        if num_new + sum(block.ref_count == 0 for block in hits) > pool.num_free:
            return 0
        pool.hold(hits)
        job.table = [*hits, *pool.take(num_new)]
        job.num_slots = len(job.table) * size
        job.num_named = len(hits)
        job.num_computed = num_hit_tokens
        self._name_full_blocks(job, num_hit_tokens + num_tokens)
        if job.num_cached_tokens is None:
            job.num_cached_tokens = num_hit_tokens
            self.counters.query_tokens += job.num_prompt_tokens
            self.counters.hit_tokens += num_hit_tokens
        self._running.append(job)
        return num_tokens

    # -- blocks ----------------------------------------------------------------------------------------------

    def _append(self, job: Job, num_tokens: int) -> bool:
        assert job.table is not None
        covered = job.num_computed + num_tokens
        num_new = -(-covered // self.shape.block_tokens) - len(job.table)
        if num_new > 0:
            if num_new > self.pool.num_free:
                return False
            job.table.extend(self.pool.take(num_new))
            job.num_slots = len(job.table) * self.shape.block_tokens
        self._name_full_blocks(job, covered)
        return True

    def _name_full_blocks(self, job: Job, num_tokens: int) -> None:
        num_full = num_tokens // self.shape.block_tokens
        if num_full <= job.num_named:
            return
        assert job.table is not None
        for index in range(job.num_named, num_full):
            self.pool.cache(job.table[index], job.names[index])
        job.num_named = num_full

    def _free(self, job: Job) -> None:
        assert job.table is not None
        self.pool.release(job.table)
        job.table = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The values that a scrape of a server would show, in the terms of a metrics page."""

    taken_s: float
    shape: EngineShape
    counters: Counters
    running: int
    waiting: int
    kv_usage: float
    active_adapters: frozenset[str]


def snapshot(engine: SimEngine, *, now: float) -> Snapshot:
    """Return the current page. Prompt tokens are counted when a prefill ends, answer tokens at every step."""
    return Snapshot(
        taken_s=now,
        shape=engine.shape,
        counters=replace(engine.counters, generated_tokens=engine.generated_tokens(now=now)),
        running=engine.num_running,
        waiting=engine.num_waiting,
        kv_usage=engine.pool.usage,
        active_adapters=engine.active_adapters,
    )
