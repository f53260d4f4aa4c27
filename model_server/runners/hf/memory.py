"""The memory for keys and values: one tensor, addressed by the block numbers that the core hands out.

`data[layer, 0]` holds keys and `data[layer, 1]` values, as (block, slot in block, KV head, head dimension).
Keys are kept after the rotation that encodes their positions. The same prefix stands before a block in each
request that shares the block, so the positions are always the same. Slots that were never written hold zeros,
because even values that attention masks out must be numbers. The core decides who may write to which block.

Callers: the attention function, block copies, and the store below the blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model_server.core.kv_cache import BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The size of one token's keys and values in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * int(self.dtype.itemsize)


class KvMemory:
    def __init__(
        self, shape: KvShape, *, num_blocks: int, block_size_tokens: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.block_size_tokens = block_size_tokens
        self.device = device
        heads = (shape.num_kv_heads, shape.head_dim)
        whole = torch.zeros(
            (shape.num_layers, 2, num_blocks + 1, block_size_tokens, *heads), dtype=shape.dtype, device=device
        )
        self.data = whole[:, :, :num_blocks]
        self.slots = whole.view(shape.num_layers, 2, (num_blocks + 1) * block_size_tokens, *heads)
        """The same tensor by slots, (layer, keys and values, slot, KV head, head dimension)."""
        self.spare_slot = num_blocks * block_size_tokens
        """A slot of no block, for tokens that belong to no request."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer's keys and values to their slots. `slots` has the shape (tokens,); a slot is the
        block number times the block size, plus the place in the block.

        `keys` and `values` have the shape (tokens, head, dim).
        """
        self.slots[layer, 0].index_copy_(0, slots, keys)
        self.slots[layer, 1].index_copy_(0, slots, values)

    def read(
        self, layer: int, blocks: torch.Tensor, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of whole blocks. `blocks` holds their numbers in any shape (...). Both
        results have the shape (..., slot, head, dim).

        `into` is a result of `scratch` for at least this many blocks. The next read into it overwrites this
        result. Memory that is used again and again stays in the processor's caches.
        """
        shape, numbers = (*blocks.shape, *self.data.shape[3:]), blocks.reshape(-1)
        # This copies whole blocks at the speed of memory. Indexing would copy the numbers one by one.
        keys, values = (
            torch.index_select(
                self.data[layer, part], 0, numbers, out=None if into is None else into[part, : len(numbers)]
            ).view(shape)
            for part in (0, 1)
        )
        return keys, values

    def scratch(self, num_blocks: int) -> torch.Tensor:
        """Return memory into which `read` can copy blocks."""
        return self.data.new_empty((2, num_blocks, *self.data.shape[3:]))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies of a plan in all layers, in their order."""
        for copy in copies:
            source, target, end = copy.source.block_id, copy.target.block_id, copy.num_tokens
            self.data[:, :, target, :end] = self.data[:, :, source, :end]
