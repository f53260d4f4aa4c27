"""The engine that computes a whole prompt when it is added, and three ways to batch the decoding afterwards.

This engine is the simple counterpart of the continuous engine, and uses the cache of whole prompts:
- `run_naive`: computes one request after the other, each alone;
- `OfflineScheduler`: add all requests, then run them to their ends in one batch;
- `OnlineScheduler`: add requests at any time; each step computes one token for each of at most
  `max_batch_size` requests, which take turns.

Invariant (`check_integrity`): the greatest lengths of all unfinished requests together fit the cache, so that
a decoding request always finds a block. Kept prompts that no request uses are removed if their blocks are
needed.

Greedy answers are the same in all three ways, and in the continuous engine.

Callers: benchmarks, tests, batch jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from model_server.core.engine import EngineConfig
from model_server.core.partial_cache import make_manager
from model_server.core.prompt_cache import DEFAULT_MAX_ENTRIES, PromptCache
from model_server.core.request import FinishReason, Request, RequestId, RequestState, TokenId
from model_server.core.scheduler import Chunk, StepPlan


class Model(Protocol):
    def forward(self, plan: StepPlan) -> Sequence[object]:
        """Make the plan's copies, compute its chunks, and return the logits after each chunk's last token."""
        ...


Sampler = Callable[[object, Request], TokenId]
"""Chooses the next token from logits. Callers that compare answers give a greedy sampler."""


class OutOfBlocksError(Exception):
    """The cache has no room for this request beside the unfinished requests."""


class PromptEngine:
    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        sample: Sampler,
        prompt_cache_entries: int = DEFAULT_MAX_ENTRIES,
    ) -> None:
        self.config = config
        self.kv_cache = make_manager(
            num_blocks=config.num_blocks,
            block_size_tokens=config.block_size_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            options=config.cache,
        )
        self.prompt_cache = PromptCache(self.kv_cache, max_entries=prompt_cache_entries)
        self._model = model
        self._sample = sample
        self._reserved_blocks: dict[RequestId, int] = {}

    def start(self, request: Request, *, use_prompt_cache: bool = True) -> None:
        """Compute the prompt, or find it in the cache, and sample the first token. Raise ValueError or
        OutOfBlocksError if the request is refused.
        """
        self._reserve(request)
        request.state = RequestState.RUNNING
        entry = self.prompt_cache.attach(request) if use_prompt_cache else None
        if entry is None:
            request.num_cached_tokens = self._admit(request)
            [logits] = self._forward([request])
            if use_prompt_cache:
                self.prompt_cache.put(request, logits)
        else:
            request.num_cached_tokens = request.num_prompt_tokens
            logits = entry.last_logits
        self._append(request, logits)

    def decode(self, requests: Sequence[Request]) -> None:
        """Compute one more token for each of these started, unfinished requests, in one step."""
        for request in requests:
            while not self.kv_cache.append(request, num_new_tokens=1):
                evicted = self.prompt_cache.evict_one()
                assert evicted, "reserved blocks are missing"
        for request, logits in zip(requests, self._forward(requests), strict=True):
            self._append(request, logits)

    def abort(self, request: Request) -> None:
        """End a started, unfinished request. Its blocks are free at once."""
        self._end(request, FinishReason.ABORT)

    def check_integrity(self) -> None:
        self.kv_cache.check_integrity()
        self.prompt_cache.check_integrity()
        assert sum(self._reserved_blocks.values()) <= self.config.num_blocks

    def _reserve(self, request: Request) -> None:
        if request.request_id in self._reserved_blocks:
            raise ValueError(f"request id {request.request_id} is in use")
        if request.num_prompt_tokens >= self.config.max_len_tokens:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens, and prompt and answer together may have at most "
                f"{self.config.max_len_tokens}"
            )
        longest = min(request.num_prompt_tokens + request.max_tokens, self.config.max_len_tokens)
        blocks = self.kv_cache.blocks_for(longest)
        if sum(self._reserved_blocks.values()) + blocks > self.config.num_blocks:
            raise OutOfBlocksError(
                f"the request needs {blocks} blocks in addition to those of the unfinished requests"
            )
        self._reserved_blocks[request.request_id] = blocks

    def _admit(self, request: Request) -> int:
        while True:
            prefix = self.kv_cache.get_computed(request)
            num_new_tokens = request.num_prompt_tokens - prefix.num_tokens
            if self.kv_cache.allocate(request, prefix, num_new_tokens=num_new_tokens):
                request.num_computed_tokens = prefix.num_tokens
                return prefix.num_tokens
            evicted = self.prompt_cache.evict_one()
            assert evicted, "reserved blocks are missing"

    def _forward(self, requests: Sequence[Request]) -> Sequence[object]:
        chunks = tuple(
            Chunk(
                request=request,
                start=request.num_computed_tokens,
                num_tokens=request.num_uncomputed_tokens,
                samples=True,
                table=self.kv_cache.table(request.request_id),
            )
            for request in requests
        )
        self.kv_cache.end_step()
        logits = self._model.forward(StepPlan(chunks, copies=self.kv_cache.take_copies()))
        for request in requests:
            request.num_computed_tokens = len(request.token_ids)
            self.kv_cache.computed(request)
        return logits

    def _append(self, request: Request, logits: object) -> None:
        token_id = self._sample(logits, request)
        request.token_ids.append(token_id)
        if self.config.ends(token_id) and not request.ignore_eos:
            self._end(request, FinishReason.STOP)
        elif (
            request.num_output_tokens >= request.max_tokens
            or len(request.token_ids) >= self.config.max_len_tokens
        ):
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.state = RequestState.FINISHED
        self.kv_cache.free(request)
        del self._reserved_blocks[request.request_id]


def run_naive(engine: PromptEngine, requests: Iterable[Request], *, use_prompt_cache: bool = True) -> None:
    """Run each request alone, to its end. Without `use_prompt_cache` this is the baseline that keeps no
    prompt.
    """
    for request in requests:
        engine.start(request, use_prompt_cache=use_prompt_cache)
        while request.finish_reason is None:
            engine.decode([request])


class OfflineScheduler:
    def __init__(self, engine: PromptEngine) -> None:
        self._engine = engine
        self._unfinished: list[Request] = []

    def add(self, request: Request) -> None:
        """Add a request and compute its prompt at once."""
        self._engine.start(request)
        if request.finish_reason is None:
            self._unfinished.append(request)

    def run(self) -> None:
        """Decode all added requests in one batch, to the end."""
        while self._unfinished:
            self._engine.decode(self._unfinished)
            self._unfinished = [request for request in self._unfinished if request.finish_reason is None]


class OnlineScheduler:
    def __init__(self, engine: PromptEngine, *, max_batch_size: int = 8) -> None:
        if max_batch_size < 1:
            raise ValueError("a batch has at least one request")
        self._engine = engine
        self._max_batch_size = max_batch_size
        self._ring: list[Request] = []
        """The unfinished requests, in the order of their turns."""
        self._requests: dict[RequestId, Request] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._ring)

    def add(self, request: Request) -> None:
        """Add a request and compute its prompt at once."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._engine.start(request)
        self._requests[request.request_id] = request
        if request.finish_reason is None:
            self._ring.append(request)

    def step(self) -> list[RequestId]:
        """Compute one token for each request of the next batch. Return the requests of this batch."""
        batch = self._ring[: self._max_batch_size]
        if not batch:
            return []
        self._engine.decode(batch)
        again = [request for request in batch if request.finish_reason is None]
        self._ring = [*self._ring[self._max_batch_size :], *again]
        return [request.request_id for request in batch]

    def pop(self, request_id: RequestId) -> Request:
        """Remove a request. An unfinished request is aborted. Raise KeyError if no request has this id."""
        request = self._requests.pop(request_id)
        if request.finish_reason is None:
            self._ring.remove(request)
            self._engine.abort(request)
        return request
