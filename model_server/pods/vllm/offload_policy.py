"""The cache policy that vLLM loads for its CPU offload tier.

The setting `eviction_policy` names the class, and `cache_policy_module_path` names this module. The policy
keeps vLLM's records of chunks and leaves the choice to `offload_ranking`. It runs in vLLM's process, on the
thread of vLLM's scheduler. This module imports only the standard library, vLLM and this package, so that
vLLM's image needs no other package. vLLM's interface is marked experimental; this module is written for 0.32.

Caller: vLLM. No other module of this repository may import this module, because vLLM is not installed where
the other modules run.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from model_server.pods.vllm.offload_ranking import OffloadRanking


@dataclass(slots=True)
class _OwnUses:
    """The data that this policy keeps in a request's context. Several tiers may share one context, and a
    reset begins a new ranking.
    """

    owner: object
    counted: set[OffloadKey] = field(default_factory=set)


class UsesCachePolicy(CachePolicy):  # type: ignore[misc] # vLLM is not installed where types are checked
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self.ranking = OffloadRanking(capacity_chunks=cache_capacity)

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = chunk
        self.ranking.insert(key)
        if chunk.ref_cnt == 0:
            self.ranking.unpin(key)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self.ranking.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._observe(list(keys), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: AbstractSet[OffloadKey],
        reused_keys: AbstractSet[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count the chunks that the request used. Chunks that were only inserted were counted when they
        missed, and `observe` counts no chunk twice.
        """
        del insertion_only_keys, reused_keys
        for keys in key_groups:
            self._observe(keys, req_context)

    def evict(
        self, n: int, protected: AbstractSet[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        taken = self.ranking.take_weakest(n, spared=protected)
        return None if taken is None else [(key, self._chunks.pop(key)) for key in taken]

    def clear(self) -> None:
        self._chunks.clear()
        self.ranking = OffloadRanking(capacity_chunks=self.cache_capacity)

    def mark_evictable(self, key: OffloadKey) -> None:
        self.ranking.unpin(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.ranking.pin(key)

    def check_integrity(self) -> None:
        self.ranking.check_integrity({key: chunk.ref_cnt == 0 for key, chunk in self._chunks.items()})

    def _observe(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        ends = [req_context.get_offload_key_position(key) for key in keys]
        own: _OwnUses | None = req_context.get_state(_OwnUses)
        if own is None or own.owner is not self.ranking:
            own = _OwnUses(self.ranking)
            req_context.set_state(own)
        self.ranking.observe(keys, ends_tokens=ends, counted=own.counted)
