"""Converts keys and values of a model's memory to the bytes of segments, and back.

A token's record in a layer holds its probed keys first, then the other keys and all values. Callers: the code
that stores prefixes (from a memory or from copied blocks), the reader (bytes to tensors), benchmarks.
"""

from dataclasses import dataclass

import torch

from model_server.runners.hf.memory import KvShape
from model_server.tiers.segment import KvLayout, LayerRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Converts keys and values to records, for one model."""

    shape: KvShape
    probe_kv_heads: int

    def layout(self, model: str, *, block_tokens: int, chunk_tokens: int) -> KvLayout:
        head_bytes = self.shape.head_dim * int(self.shape.dtype.itemsize)
        return KvLayout(
            model=model,
            dtype=str(self.shape.dtype).removeprefix("torch."),
            num_layers=self.shape.num_layers,
            probe_bytes=self.probe_kv_heads * head_bytes,
            rest_bytes=(2 * self.shape.num_kv_heads - self.probe_kv_heads) * head_bytes,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
        )

    def of_blocks(self, content: torch.Tensor) -> list[LayerRecords]:
        """Return the records of blocks that were copied out of a memory: (layer, keys and values, block,
        slot, head, dim), on the CPU.
        """
        layers = []
        for layer in content:
            keys, values = (part.flatten(0, 1) for part in layer)
            rest = torch.cat((keys[:, self.probe_kv_heads :], values), dim=1)
            layers.append(LayerRecords(_bytes(keys[:, : self.probe_kv_heads]), _bytes(rest)))
        return layers

    def tensor(self, content: torch.Tensor, *, num_heads: int) -> torch.Tensor:
        """Return the bytes as a tensor (tokens, heads, dim)."""
        if not len(content) or not num_heads:
            return torch.empty(
                0, num_heads, self.shape.head_dim, dtype=self.shape.dtype, device=content.device
            )
        return content.view(self.shape.dtype).view(-1, num_heads, self.shape.head_dim)


def _bytes(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return content
