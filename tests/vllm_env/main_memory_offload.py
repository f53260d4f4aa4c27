"""vLLM's own offload tier with a worker for its CPU backend, which has no worker of its own. The worker
copies between main memory and main memory.

vLLM's connector, scheduler side, manager and cache policy are the real ones. Only the copies, which vLLM
makes with CUDA streams, are plain copies here. So a test can see a real server use a cache policy on a
machine without a GPU. vLLM itself loads this module (`spec_module_path`) in the vLLM environment. Nothing
else imports it.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MainMemoryWorker(OffloadingWorker):  # type: ignore[misc] # vLLM is not installed where types are checked
    """The worker copies between main memory and main memory. One chunk is one block, and all layers are in
    one group, as in the tiny model.
    """

    def __init__(self, caches: CanonicalKVCaches, *, num_chunks: int) -> None:
        self._blocks = [cache.tensor for cache in caches.tensors]
        self._chunks = [
            torch.empty((num_chunks, blocks.shape[1]), dtype=torch.int8) for blocks in self._blocks
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, self._blocks, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._chunks, src_spec, self._blocks, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: each copy ends when it is submitted."""

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        source: LoadStoreSpec,
        targets: list[torch.Tensor],
        target: LoadStoreSpec,
    ) -> bool:
        assert isinstance(source, BlockIDsLoadStoreSpec)
        assert isinstance(target, BlockIDsLoadStoreSpec)
        read, written = (torch.from_numpy(spec.block_ids).long() for spec in (source, target))
        for from_, to in zip(sources, targets, strict=True):
            to[written] = from_[read]
        num_bytes = sum(blocks.shape[1] for blocks in self._blocks) * len(read)
        self._finished.append(
            TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=0.0)
        )
        return True


class MainMemorySpec(CPUOffloadingSpec):  # type: ignore[misc] # as above
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return MainMemoryWorker(kv_caches, num_chunks=self.num_chunks)
