"""The options of a KV cache. Callers: engine configuration, cache managers."""

from dataclasses import dataclass

from model_server.core.eviction import EVICTION_NAMES, EvictionName
from model_server.core.hashing import DEFAULT_SEED, HASH_ALGORITHMS, HashAlgorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    hash_algorithm: HashAlgorithm = "sha256"
    hash_seed: str = DEFAULT_SEED
    """The seed of the root hash. Servers whose events are compared need the same seed."""
    eviction: EvictionName = "lru"
    max_unused_blocks: int | None = None
    """The most free blocks that keep cached content. None means all free blocks."""
    preallocated_blocks: int = 0
    """When a request needs a new block, it gets up to this many more empty blocks, if they are free."""
    partial_blocks: bool = False
    """True means that blocks that are not full can be found too, token by token. False means full blocks
    only, as in vLLM.
    """

    def __post_init__(self) -> None:
        for value, known in (
            (self.hash_algorithm, HASH_ALGORITHMS),
            (self.eviction, EVICTION_NAMES),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        if self.preallocated_blocks < 0:
            raise ValueError("preallocated_blocks must not be negative")
        if self.max_unused_blocks is not None and self.max_unused_blocks < 0:
            raise ValueError("max_unused_blocks must not be negative")
