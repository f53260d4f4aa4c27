"""The engine takes requests and returns tokens, one step at a time.

A step is `begin` (schedule, reserve blocks), the runner's `execute`, and `finish` (append the tokens, end
finished requests). The three are separate because a step takes time: the server begins a step, waits as long
as the runner says, and finishes the step. While the server waits, the engine shows the requests that are
being computed. `step` does all three for callers with a clock of their own.

Between `begin` and `finish` only `add`, `abort`, `stop` and reads are allowed. The blocks of a request that
`abort` or `stop` ends are free at once, and the current step yields no token for this request.

Everything is deterministic: the same calls give the same answers. Callers: the server's driver, and tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model_server.core.cache_options import CacheOptions
from model_server.core.partial_cache import make_manager
from model_server.core.prompt_cache import PromptCache
from model_server.core.request import FinishReason, Request, RequestId, RequestState, TokenId
from model_server.core.sampling import TokenLogprobs
from model_server.core.scheduler import Scheduler, SchedulerLimits, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    token_ids: Sequence[TokenId | None]
    """The next token for each chunk of the plan. None means that the chunk samples no token."""
    duration_s: float
    """The time of the step in addition to the call itself. It is 0 for a runner that really computes."""
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """For each chunk, the log probabilities that its request asked for. None means that no request asked."""
    last_logits: Sequence[object] | None = None
    """For each chunk that `keeps_logits`, the logits of its next token. None means that the runner has no
    logits.
    """


class Runner(Protocol):
    """Turns a plan into tokens. A runner is the cost model or a real model."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one request. A step yields at most one token for each request."""

    request: Request
    token_id: TokenId
    previous_token_s: float | None
    """The time of the request's previous token. None means that this is the first token."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    num_blocks: int = 4096
    block_size_tokens: int = 16
    enable_prefix_caching: bool = True
    max_model_len_tokens: int | None = None
    """The longest prompt plus answer. None means as many tokens as the blocks can hold."""
    eos_token_id: TokenId
    more_eos_token_ids: frozenset[TokenId] = frozenset()
    """Further tokens that end an answer, for models that have several."""
    prompt_cache_entries: int = 0
    """The number of whole prompts that are kept with their logits, so that equal prompts need no prefill. 0
    means that none is kept.
    """
    cache: CacheOptions = field(default_factory=CacheOptions)
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size_tokens < 1:
            raise ValueError("the cache needs at least one block of at least one token")
        if (
            self.max_model_len_tokens is not None
            and not 2 <= self.max_model_len_tokens <= self.capacity_tokens
        ):
            raise ValueError(
                f"max model length {self.max_model_len_tokens} is not between 2 and {self.capacity_tokens}: {self.num_blocks} blocks "
                f"of {self.block_size_tokens} tokens have no room for a longer request"
            )

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size_tokens

    @property
    def max_len_tokens(self) -> int:
        return self.max_model_len_tokens or self.capacity_tokens

    def ends(self, token_id: TokenId) -> bool:
        """Return whether the token ends an answer."""
        return token_id == self.eos_token_id or token_id in self.more_eos_token_ids


class Engine:
    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self.runner = runner
        self.kv_cache = make_manager(
            num_blocks=config.num_blocks,
            block_size_tokens=config.block_size_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            options=config.cache,
        )
        self.prompt_cache: PromptCache | None = None
        if config.prompt_cache_entries:
            self.prompt_cache = PromptCache(self.kv_cache, max_entries=config.prompt_cache_entries)
        self.scheduler = Scheduler(self.kv_cache, config.limits, prompts=self.prompt_cache)
        self._requests: dict[RequestId, Request] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def can_step(self) -> bool:
        """Tell whether a step would compute something, because some unfinished request does not wait for a
        store.
        """
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raise ValueError if its prompt leaves no room for a token, or its id is in use."""
        if request.num_prompt_tokens >= self.config.max_len_tokens:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens, and prompt and answer together may have at most "
                f"{self.config.max_len_tokens}"
            )
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: RequestId) -> Request | None:
        """End a request now and free its blocks. Return None if the request had already ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)
        return request

    def stop(self, request_id: RequestId) -> None:
        """End an unfinished request as complete, because its text contains a stop string."""
        self._end(self._requests[request_id], FinishReason.STOP)

    def begin(self, *, now: float) -> StepPlan:
        """Plan the next step. If the engine `can_step`, the plan has at least one chunk."""
        plan = self.scheduler.schedule(now=now)
        assert plan.chunks or not self.can_step, "requests wait and nothing can run"
        return plan

    def finish(self, plan: StepPlan, result: StepResult, *, now: float) -> list[TokenOutput]:
        """Record a computed step. A request that ended in this step has a `finish_reason` and holds no
        blocks.
        """
        outputs: list[TokenOutput] = []
        all_logprobs = result.logprobs or [None] * len(plan.chunks)
        all_logits = result.last_logits or [None] * len(plan.chunks)
        for chunk, token_id, logprobs, logits in zip(
            plan.chunks, result.token_ids, all_logprobs, all_logits, strict=True
        ):
            request = chunk.request
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens += chunk.num_tokens
            self.kv_cache.computed(request)
            if chunk.keeps_logits and self.prompt_cache is not None:
                self.prompt_cache.put(request, logits)
            if chunk.samples:
                assert token_id is not None, "the runner left out a token"
                outputs.append(self._append(request, token_id, logprobs, now=now))
        return outputs

    def step(self, *, now: float) -> tuple[list[TokenOutput], float]:
        """Do one whole step that starts at `now`. Return the new tokens, and the time when the step ended."""
        plan = self.begin(now=now)
        result = self.runner.execute(plan)
        end_s = now + result.duration_s
        return self.finish(plan, result, now=end_s), end_s

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Unfinished requests keep their blocks."""
        if self.prompt_cache is not None:
            self.prompt_cache.clear()
        self.kv_cache.reset_prefix_cache()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        if self.prompt_cache is not None:
            self.prompt_cache.check_integrity()
        queued = {r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == self._requests.keys()
        assert all(request.finish_reason is None for request in self._requests.values())

    def _append(
        self, request: Request, token_id: TokenId, logprobs: TokenLogprobs | None, *, now: float
    ) -> TokenOutput:
        output = TokenOutput(request, token_id, request.last_token_s, logprobs)
        request.token_ids.append(token_id)
        request.last_token_s = now
        if request.first_token_s is None:
            request.first_token_s = now
        ends = self.config.ends(token_id) and not request.ignore_eos
        sampling = request.sampling
        if request.num_output_tokens > sampling.min_tokens and (ends or token_id in sampling.stop_token_ids):
            self._end(request, FinishReason.STOP)
        elif (
            request.num_output_tokens >= request.max_tokens
            or len(request.token_ids) >= self.config.max_len_tokens
        ):
            self._end(request, FinishReason.LENGTH)
        return output

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        del self._requests[request.request_id]
