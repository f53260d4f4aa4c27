"""One generation request as the engine sees it: its tokens, how far they are computed, and its times.

A `Request` is the one mutable record of the core. The scheduler moves its state and its computed count, the
engine appends tokens, and nobody outside the core writes to it. Times are monotonic seconds, given by the
caller.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field, replace
from typing import NewType

import xxhash

from model_server.core.hashing import BlockHash, PrefixScope
from model_server.core.sampling import GREEDY, SamplingParams
from model_server.core.stored_prefix import LoadedPrefix, OutsidePrefix

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)

NO_TOKEN = TokenId(-1)
"""No model says this: the end marker of one that has none."""


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended, by the names of the OpenAI API, and of vLLM's metric."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. Another path under the same name is another adapter: their KV caches differ."""

    name: str
    path: str = ""


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
    """Names how its KV is computed where that is not exact:
    such blocks serve only requests of the same name."""
    seed: int = 0
    """For a runner that makes up its answers; one that samples reads `sampling`."""
    sampling: SamplingParams = GREEDY

    state: RequestState = field(default=RequestState.WAITING, init=False)
    num_prompt_tokens: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    """How many of `token_ids` have their KV in the cache; 0 again after a preemption."""
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens found in the cache when the request was first admitted; None while it has never been."""
    loading: bool = field(default=False, init=False)
    """Its prefix is being fetched from a store below the cache: it is not admitted before that has ended."""
    stored: LoadedPrefix | OutsidePrefix | None = field(default=None, init=False)
    """What was fetched. A loaded one is used once, by the first admission."""
    num_stored_tokens: int = field(default=0, init=False)
    """How many of `num_cached_tokens` came from that store."""
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)
    """The chain over the full blocks of `token_ids`, as far as it was needed."""
    scope: PrefixScope = field(default=PrefixScope(), init=False)
    """With whom the prompt's blocks may be shared."""
    fingerprint: int = field(default=0, init=False)
    """Hash of prompt, adapter and seed: a runner that makes up its answer makes it from this."""

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
        """Before it is admitted: its KV will not be exact, and its blocks get other hashes."""
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
