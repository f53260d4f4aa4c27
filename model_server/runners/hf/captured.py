"""Steps in which each request computes one token, captured as CUDA graphs: the GPU gets a whole step at once,
and does not wait for Python between two layers.

A graph has fixed sizes: the next power of two of the step's requests, and of the tokens of all contexts. The
requests that fill it up have no context, and write to the memory's spare slot. Caller: the model.
"""

from collections.abc import Callable

import torch

from model_server.runners.hf.batch import StepBatch
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.packed import PackedTokens

_LEAST_SLOTS = 1024
_Captured = tuple[StepBatch, PackedTokens, torch.cuda.CUDAGraph, torch.Tensor]
"""The tensors that a graph reads, the graph, and the tensor that it writes."""


class CapturedSteps:
    """The graphs of one model over one memory. `compute` returns the logits of a step, (chunks,
    vocabulary).
    """

    def __init__(self, memory: KvMemory, compute: Callable[[StepBatch], torch.Tensor]) -> None:
        self._memory = memory
        self._compute = compute
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def compute(self, batch: StepBatch, packed: PackedTokens) -> torch.Tensor:
        """Return the logits of the step."""
        requests, slots = len(packed.rows), len(packed.slots)
        most, room = (1 << (count - 1).bit_length() for count in (requests, max(_LEAST_SLOTS, slots)))
        if (most, room) not in self._graphs:
            self._graphs[most, room] = self._capture(most, room)
        own, own_packed, graph, logits = self._graphs[most, room]
        own.slots.fill_(self._memory.spare_slot)
        own_packed.slot_ends.fill_(slots)
        for target, source in (
            (own.token_ids[0], batch.token_ids[0]),
            (own.positions[0], batch.positions[0]),
            (own.slots, batch.slots),
            (own_packed.slots, packed.slots),
            (own_packed.slot_ends, packed.slot_ends),
        ):
            target[: len(source)].copy_(source)
        graph.replay()
        return logits[:requests].clone()  # the next step of this size overwrites them

    def _capture(self, requests: int, slots: int) -> _Captured:
        device = self._memory.device
        rows, ends = (torch.arange(requests + more, device=device) for more in (0, 1))
        packed = PackedTokens(
            rows=rows,
            slots=torch.zeros(slots, dtype=torch.long, device=device),
            row_ends=ends.int(),
            slot_ends=torch.zeros_like(ends, dtype=torch.int32),
            most_rows=1,
            most_slots=slots,
        )
        spare = torch.full_like(rows, self._memory.spare_slot)
        batch = StepBatch(rows[None].clone(), rows[None].clone(), spare, rows, (), (), packed)
        self._compute(batch)  # what libraries set up in their first call is no part of a graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(batch)
        return batch, packed, graph, logits
