"""Continuous batching decides which requests compute how many tokens in the next step.

The rule is first come, first served:
- each step has a token budget. Running requests are served first, in order of admission. A request that
  decodes gets one token. A request in prefill gets as much of its prompt as the budget leaves, so long
  prompts come in chunks between other requests' tokens;
- when blocks run out, the request admitted last gives its blocks back and waits at the head of the queue. The
  request starts again later, after the part of it that is still in the prefix cache. So the oldest running
  request always continues. A request that could not fit alone is refused when it is added. For both reasons
  every request ends;
- then waiting requests are admitted while budget, places and blocks last. A request that cannot get blocks
  stops the admission, so that small requests do not starve a large one. A request is skipped if its LoRA
  adapter finds no slot, or if its prefix is still being loaded from a store below the cache.

Invariants (`check_integrity`): a request is waiting or running, never both. Running requests hold blocks and
waiting requests hold none. At most `max_num_seqs` run, with at most `max_loras` different adapters.

Callers: the engine. This module reads no clock, and only records `now`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from model_server.core.blocks import Block
from model_server.core.kv_cache import BlockCopy, CachedPrefix, KVCacheManager, PrefixLoad
from model_server.core.prompt_cache import PromptCache, PromptEntry
from model_server.core.request import Adapter, LoadedPrefix, Request, RequestId, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_loras: int = 4

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_loras"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + num_tokens) of one request, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """True if the chunk ends at the newest token, so that the step yields the next token."""
    table: Sequence[Block]
    """The request's blocks, for a runner that writes KV."""
    kept: PromptEntry | None = None
    """The kept result of an equal prompt. The chunk then has no tokens, and the next token comes from this
    result.
    """
    keeps_logits: bool = False
    """True if the chunk ends a prompt that will be kept, so that the step's result must have its logits."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]
    preempted: tuple[RequestId, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    """For a runner that writes KV: the copies to make, in this order, before any chunk is computed."""
    loads: tuple[PrefixLoad, ...] = ()
    """For a runner that writes KV: the loads to make before any chunk is computed."""


class Scheduler:
    def __init__(
        self, kv_cache: KVCacheManager, limits: SchedulerLimits, *, prompts: PromptCache | None = None
    ) -> None:
        """`prompts` is the cache of whole prompts. None means that no prompts are kept."""
        self._kv_cache = kv_cache
        self._prompts = prompts
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def waiting(self) -> Sequence[Request]:
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    @property
    def has_work(self) -> bool:
        """Tell whether some unfinished request does not wait for its prefix to be loaded."""
        return bool(self._running) or any(not request.loading for request in self._waiting)

    def add(self, request: Request) -> None:
        assert request.state is RequestState.WAITING
        self._waiting.append(request)

    def schedule(self, *, now: float) -> StepPlan:
        """Decide the next step and reserve its blocks."""
        budget = self._limits.max_num_batched_tokens
        chunks, preempted = self._continue_running(budget)
        budget -= sum(chunk.num_tokens for chunk in chunks)
        if not preempted:
            chunks += self._admit(budget, now=now)
        self._kv_cache.end_step()
        return StepPlan(
            tuple(chunks), tuple(preempted), self._kv_cache.take_copies(), self._kv_cache.take_loads()
        )

    def remove(self, request: Request) -> None:
        """Remove an ended request, whether it waits or runs. Its blocks are free at once."""
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._kv_cache.free(request)
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED

    def check_integrity(self) -> None:
        self._kv_cache.check_integrity()
        assert all(request.state is RequestState.WAITING for request in self._waiting)
        assert all(request.num_computed_tokens == 0 for request in self._waiting)
        assert all(request.state is RequestState.RUNNING for request in self._running)
        assert len({r.request_id for r in (*self._waiting, *self._running)}) == len(self._waiting) + len(
            self._running
        )
        held = self._kv_cache.num_pins
        held += sum(len(self._kv_cache.table(request.request_id)) for request in self._running)
        assert held == sum(block.ref_count for block in self._kv_cache.pool.blocks), (
            "a waiting request holds blocks"
        )
        assert len(self._running) <= self._limits.max_num_seqs
        assert len({r.adapter for r in self._running if r.adapter}) <= self._limits.max_loras

    def _continue_running(self, budget: int) -> tuple[list[Chunk], list[RequestId]]:
        chunks: list[Chunk] = []
        preempted: list[RequestId] = []
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_tokens = min(request.num_uncomputed_tokens, budget)
            while not self._kv_cache.append(request, num_new_tokens=num_tokens):
                if self._give_up_prompt():
                    continue
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    return chunks, preempted
            chunks.append(self._chunk(request, num_tokens))
            budget -= num_tokens
            index += 1
        return chunks, preempted

    def _preempt(self, request: Request) -> None:
        self._kv_cache.free(request)
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit(self, budget: int, *, now: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        skipped: list[Request] = []
        adapters = {request.adapter for request in self._running if request.adapter}
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if request.loading or self._needs_slot(request, adapters):
                skipped.append(self._waiting.popleft())
                continue
            chunk = self._try_admit(request, budget, now=now)
            if chunk is None:
                break
            self._waiting.popleft()
            chunks.append(chunk)
            budget -= chunk.num_tokens
            if request.adapter:
                adapters.add(request.adapter)
        self._waiting.extendleft(reversed(skipped))
        return chunks

    def _needs_slot(self, request: Request, adapters: set[Adapter]) -> bool:
        full = len(adapters) >= self._limits.max_loras
        return full and request.adapter is not None and request.adapter not in adapters

    def _try_admit(self, request: Request, budget: int, *, now: float) -> Chunk | None:
        kept = self._kept(request)
        if kept is not None:
            request.state = RequestState.RUNNING
            self._record_first_admission(request, CachedPrefix((), request.num_prompt_tokens), now=now)
            self._running.append(request)
            return self._chunk(request, 0, kept=kept)
        while True:
            computed = self._kv_cache.get_computed(request)
            num_hit_tokens = computed.num_tokens
            num_tokens = min(len(request.token_ids) - num_hit_tokens, budget)
            if self._kv_cache.allocate(request, computed, num_new_tokens=num_tokens):
                break
            if not self._give_up_prompt():
                return None
        request.state = RequestState.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if isinstance(request.stored, LoadedPrefix):
            request.stored = None
        if request.num_cached_tokens is None:
            self._record_first_admission(request, computed, now=now)
        self._running.append(request)
        return self._chunk(request, num_tokens)

    def _kept(self, request: Request) -> PromptEntry | None:
        """Return the kept prompt of the request, which then holds its blocks. Return None for a request that
        returns with a part of its answer.
        """
        if self._prompts is None or request.num_cached_tokens is not None:
            return None
        return self._prompts.attach(request)

    def _give_up_prompt(self) -> bool:
        """Remove a prompt that is only kept, because blocks are needed. Return False if no prompt is kept."""
        return self._prompts is not None and self._prompts.evict_one()

    def _record_first_admission(self, request: Request, computed: CachedPrefix, *, now: float) -> None:
        num_own_tokens = len(computed.blocks) * self._kv_cache.block_size_tokens
        if computed.loaded is not None or computed.outside_blocks:
            request.num_stored_tokens = computed.num_tokens - num_own_tokens
        request.num_cached_tokens = computed.num_tokens
        request.scheduled_s = now
        self._kv_cache.record_admission(
            num_tokens=request.num_prompt_tokens,
            num_hit_tokens=computed.num_tokens - request.num_stored_tokens,
            num_stored_tokens=request.num_stored_tokens,
        )

    def _chunk(self, request: Request, num_tokens: int, *, kept: PromptEntry | None = None) -> Chunk:
        samples = num_tokens == request.num_uncomputed_tokens
        first = samples and kept is None and request.num_output_tokens == 0
        return Chunk(
            request=request,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            samples=samples,
            table=self._kv_cache.table(request.request_id),
            kept=kept,
            keeps_logits=first and self._prompts is not None,
        )
