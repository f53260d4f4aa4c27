"""Attention of all requests of a step in one call, for a GPU and numbers of two bytes: FlashAttention over
the requests' queries, which stand one after the other, and over their keys and values, which are copied out
of their blocks. Callers: the batch and captured steps build it, the attention function uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from model_server.runners.hf.memory import KvMemory


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """The tokens of requests without a view."""

    rows: torch.Tensor
    """The row in the step of each token. The shape is (tokens,)."""
    slots: torch.Tensor
    """The slots of all contexts, with the step's own tokens. The shape is (context tokens,)."""
    row_ends: torch.Tensor
    """Where in `rows` each request begins, and where the last one ends. The shape is (requests + 1,)."""
    slot_ends: torch.Tensor
    """The same for `slots`. `most_rows` and `most_slots` are the largest differences in these two."""
    most_rows: int
    most_slots: int

    def attend(self, layer: int, query: torch.Tensor, *, memory: KvMemory, scaling: float) -> torch.Tensor:
        """Attend in one layer. `query` and the result have the shape (tokens, head, dim)."""
        keys, values = (memory.slots[layer, part].index_select(0, self.slots) for part in (0, 1))
        ends = (self.row_ends, self.slot_ends, self.most_rows, self.most_slots)
        return flash_attention(query, keys, values, *ends, 0.0, True, False, scale=scaling)[0]


# torch.nn.attention.varlen calls this too, but each release wants to be told of grouped heads otherwise. The
# arguments after the ends: no dropout, a token sees those up to its own, and no mask for debugging.
flash_attention = torch.ops.aten._flash_attention_forward  # noqa: SLF001


def possible(memory: KvMemory) -> bool:
    """Return whether FlashAttention takes this GPU and these heads."""
    half, dim = memory.shape.dtype in (torch.float16, torch.bfloat16), memory.shape.head_dim
    if memory.device.type != "cuda" or not half or dim % 8 or dim > 256:
        return False
    return bool(torch.cuda.get_device_capability(memory.device) >= (8, 0))


def pack(
    requests: Sequence[tuple[range, Sequence[int], int]], *, block_size_tokens: int, device: torch.device
) -> PackedTokens:
    """Return the tokens of requests. Each request has its rows, its blocks and the length of its context."""
    sizes, ends = [len(rows) for rows, _, _ in requests], [end for _, _, end in requests]
    most = max(len(blocks) for _, blocks, _ in requests)
    table = torch.tensor([[*blocks, *[0] * (most - len(blocks))] for _, blocks, _ in requests])
    slots = (table[:, :, None] * block_size_tokens + torch.arange(block_size_tokens)).flatten(1)
    used = torch.arange(slots.shape[1]) < torch.tensor(ends)[:, None]
    return PackedTokens(
        rows=torch.tensor([row for rows, _, _ in requests for row in rows], device=device),
        slots=slots[used].to(device),
        row_ends=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device),
        slot_ends=torch.tensor([0, *accumulate(ends)], dtype=torch.int32, device=device),
        most_rows=max(sizes),
        most_slots=max(ends),
    )
