"""How a KV cache is kept: what may be chosen, and nothing else.
Callers: engine configuration, cache managers.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.core.eviction import EVICTION_NAMES, QUEUES, EvictionName, QueueName
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS, HashAlgorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    hash_algorithm: HashAlgorithm = "sha256"
    hash_seed: str = DEFAULT_SEED
    """What the root hash is made from; servers whose events are compared need the same."""
    eviction: EvictionName = "lru"
    free_queue: QueueName = "linked"
    """How `lru` keeps its order."""
    max_unused_blocks: int | None = None
    """Most blocks that keep cached content while nobody holds them; None: all of them."""
    preallocated_blocks: int = 0
    """Empty blocks a request gets beyond what it needs, when it needs a new one and they are free."""
    partial_blocks: bool = False
    """Blocks that are not full can be found too, token by token; False: full blocks only, as vLLM does."""

    def __post_init__(self) -> None:
        for value, known in (
            (self.hash_algorithm, HASH_ALGORITHMS),
            (self.eviction, EVICTION_NAMES),
            (self.free_queue, tuple(QUEUES)),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if self.preallocated_blocks < 0:
            raise ValueError("preallocated_blocks must not be negative")
        if self.max_unused_blocks is not None and self.max_unused_blocks < 0:
            raise ValueError("max_unused_blocks must not be negative")
