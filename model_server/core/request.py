"""One generation request as the engine sees it: its tokens, how many are computed, and its times.

A `Request` is the only mutable record of the core. The scheduler changes its state and its computed count,
the engine appends tokens, and no code outside the core writes to it. Times are monotonic seconds, given by
the caller.
"""

import enum
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

import xxhash

from model_server.core.hashing import BlockHash, PrefixScope
from model_server.core.sampling import GREEDY, SamplingParams

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)

Constraint = Callable[[Sequence[TokenId]], Collection[int]]
"""Returns the tokens that may follow the tokens of an answer so far. Each answer has a constraint of its own.
"""

NO_TOKEN = TokenId(-1)
"""The end marker of a model that has no end marker of its own. No model produces this token."""


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """The reason why a request ended. The names are those of the OpenAI API and of vLLM's metric."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. Another path under the same name is another adapter: their KV caches differ."""

    name: str
    path: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPrefix:
    """Exact KV of the blocks [first_block, end_block), in memory and verified. The runner copies it into
    blocks.
    """

    first_block: int
    end_block: int
    size_bytes: int
    content: object


@dataclass(frozen=True, slots=True, eq=False)
class OutsidePrefix:
    """The runner reads the first `num_blocks` blocks from the store through its view, and copies nothing. The
    request's own blocks at these places stay empty, and cannot be found. All KV that is computed after such a
    prefix is approximate, so the request's scope names the approximation.
    """

    num_blocks: int
    view: object


@dataclass(slots=True, eq=False)
class Request:
    request_id: RequestId
    token_ids: list[TokenId]
    """The prompt, then the answer so far."""
    max_tokens: int
    arrival_s: float
    ignore_eos: bool = False
    adapter: Adapter | None = None
    cache_salt: str = ""
    approximation: str = ""
    """The name of the approximation by which the request's KV is computed. Empty means that the KV is exact.
    Approximate blocks serve only requests with the same name.
    """
    seed: int = 0
    """Part of `fingerprint`, for a runner that makes up its answers. A runner that samples reads `sampling`.
    """
    sampling: SamplingParams = GREEDY
    constraint: Constraint | None = None

    state: RequestState = field(default=RequestState.WAITING, init=False)
    num_prompt_tokens: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    """The number of `token_ids` whose KV is in the cache. A preemption sets it to 0 again."""
    num_cached_tokens: int | None = field(default=None, init=False)
    """The prompt tokens found in the cache at the first admission. None means that the request was not
    admitted yet.
    """
    loading: bool = field(default=False, init=False)
    """True while its prefix is fetched from a store below the cache. The request is admitted only after the
    fetch.
    """
    stored: LoadedPrefix | OutsidePrefix | None = field(default=None, init=False)
    """The fetched prefix. A loaded prefix is used once, by the first admission."""
    num_stored_tokens: int = field(default=0, init=False)
    """The number of `num_cached_tokens` that came from the store below the cache."""
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)
    """The chain over the full blocks of `token_ids`, as far as it was needed."""
    scope: PrefixScope = field(default=PrefixScope(), init=False)
    """Decides with which requests the prompt's blocks may be shared."""
    fingerprint: int = field(default=0, init=False)
    """Hash of prompt, adapter and seed. A runner that makes up its answer makes it from this hash."""

    scheduled_s: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    last_token_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a prompt has at least one token")
        if self.max_tokens < 1:
            raise ValueError("an answer has at least one token")
        self.num_prompt_tokens = len(self.token_ids)
        name, path = (self.adapter.name, self.adapter.path) if self.adapter else ("", "")
        self.scope = PrefixScope(
            adapter_name=name,
            adapter_path=path,
            cache_salt=self.cache_salt,
            approximation=self.approximation,
        )
        prompt = struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)
        own = PrefixScope(adapter_name=name, adapter_path=path).packed()
        self.fingerprint = xxhash.xxh3_64_intdigest(prompt + own, seed=self.seed & 0xFFFFFFFFFFFFFFFF)

    def approximate(self, name: str) -> None:
        """Mark the KV of this request as not exact, so that its blocks get other hashes. Call it before
        admission.
        """
        assert self.state is RequestState.WAITING
        self.approximation = name
        self.scope = replace(self.scope, approximation=name)
        self.block_hashes.clear()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
