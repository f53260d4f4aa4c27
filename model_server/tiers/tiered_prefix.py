"""One request's prefix in the tiers, as the request's view reads it: layer by layer, first the probed keys,
then the chosen tokens. The reader decides when data is read and in which thread. This module knows which data
is wanted, and where each token is in the fetched data. The tiered reader makes these prefixes, and views use
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from model_server.tiers.records import Records
from model_server.tiers.segment import KvLayout, Segment

PROBE = -1
"""The number of the chunk that holds a layer's probed keys."""

ChunkKey = tuple[Segment, int, int]
"""The key of a chunk holds the segment, the layer and the number of the chunk."""

LayerRead = Sequence[tuple[Segment, int, int]]
"""The chunks in the order in which they are wanted: (segment, chunk, how many chosen tokens it holds)."""


_T = TypeVar("_T")


class Tiers(Protocol):
    """The methods of the reader that a prefix calls. They say where tokens are stored, and fetch chunks in
    the reader's thread.
    """

    records: Records
    device: torch.device
    layers_ahead: int

    @property
    def layout(self) -> KvLayout: ...
    def submit(self, layer: int, work: LayerRead) -> Future[list[torch.Tensor]]: ...
    def wait_for(self, work: Future[_T]) -> _T: ...


class TieredPrefix:
    """`PrefixSource` over the tiers, for one request. Layers are asked for in ascending order."""

    def __init__(self, reader: Tiers, parts: Sequence[tuple[Segment, int]]) -> None:
        self.parts = parts
        self._reader = reader
        self._records = reader.records
        self._block_tokens = reader.layout.block_tokens
        self._probes: dict[int, Future[list[torch.Tensor]]] = {}
        self._num_fetched_ahead = 0
        """The probed keys of this many first layers were fetched ahead. If these keys are needed again, they
        are not fetched ahead again.
        """
        self._probed: dict[int, torch.Tensor] = {}
        self._reads: dict[int, Future[list[torch.Tensor]]] = {}
        self._foreseen: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return sum(num_blocks for _, num_blocks in self.parts) * self._block_tokens

    def foresee(self, tokens: torch.Tensor) -> None:
        """Note that every layer will read exactly these tokens. Their chunks are fetched ahead, without
        waiting for a choice.
        """
        self._foreseen = tokens

    def probe_keys(self, layer: int) -> torch.Tensor:
        shape, heads, device = self._records.shape, self._records.probe_kv_heads, self._reader.device
        if not heads:
            return torch.empty(self.num_tokens, 0, shape.head_dim, dtype=shape.dtype, device=device)
        for ahead in self._ahead(layer):
            if ahead not in self._probes and (ahead == layer or ahead >= self._num_fetched_ahead):
                self._probes[ahead] = self._reader.submit(ahead, self._probe_read())
        self._num_fetched_ahead = max(self._num_fetched_ahead, self._ahead(layer).stop)
        contents = self._reader.wait_for(self._probes.pop(layer))
        keys = [
            self._records.tensor(content.to(device), num_heads=heads)[: num_blocks * self._block_tokens]
            for content, (_, num_blocks) in zip(contents, self.parts, strict=True)
        ]
        probed = self._probed[layer] = torch.cat(keys)
        return probed

    def chunks(self, layer: int) -> torch.Tensor:
        layout = self._reader.layout
        numbers, first = [], 0
        for segment, num_blocks in self.parts:
            slots = torch.tensor(segment.orders[layer].slots[: num_blocks * self._block_tokens])
            numbers.append(first + slots // layout.chunk_tokens)
            first += layout.num_chunks(segment.num_tokens)
        return torch.cat(numbers).to(self._reader.device)

    def read(self, layer: int, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        probed = self._probed.pop(layer) if layer in self._probed else self.probe_keys(layer)
        chosen = torch.arange(self.num_tokens) if tokens is None else tokens.cpu()
        if self._foreseen is not None:
            assert torch.equal(chosen, self._foreseen), (
                "the tokens of this read differ from the tokens that were read ahead"
            )
            for ahead in self._ahead(layer):
                if ahead not in self._reads:
                    self._reads[ahead] = self._reader.submit(ahead, self._wanted(ahead, chosen)[0])
        wanted, rows = self._wanted(layer, chosen)
        reading = self._reads.pop(layer, None) or self._reader.submit(layer, wanted)
        others = self._records.shape.num_kv_heads - self._records.probe_kv_heads
        heads = others + self._records.shape.num_kv_heads
        device = self._reader.device
        contents = self._reader.wait_for(reading)
        stored = torch.cat([content.to(device) for content in contents])
        rest = self._records.tensor(stored, num_heads=heads).index_select(0, rows.to(device))
        probed = probed.index_select(0, chosen.to(device))
        return torch.cat((probed, rest[:, :others]), dim=1), rest[:, others:]

    def _ahead(self, layer: int) -> range:
        return range(layer, min(layer + self._reader.layers_ahead + 1, self._records.shape.num_layers))

    def _wanted(self, layer: int, chosen: torch.Tensor) -> tuple[LayerRead, torch.Tensor]:
        """Return the chunks to read, and the row of each chosen token among all rows of these chunks."""
        layout = self._reader.layout
        wanted: list[tuple[Segment, int, int]] = []
        rows, num_rows, start, size = [], 0, 0, layout.chunk_tokens
        for segment, num_blocks in self.parts:
            end = start + num_blocks * self._block_tokens
            own = chosen[(chosen >= start) & (chosen < end)] - start
            slots = torch.tensor(segment.orders[layer].slots)[own]
            chunks, ranks, counts = (slots // size).unique(return_inverse=True, return_counts=True)
            read = chunks.tolist()
            wanted += [(segment, chunk, held) for chunk, held in zip(read, counts.tolist(), strict=True)]
            rows.append(num_rows + ranks * size + slots % size)
            num_rows += sum(min(size, segment.num_tokens - chunk * size) for chunk in read)
            start = end
        return wanted, torch.cat(rows)

    def _probe_read(self) -> LayerRead:
        """Return the read of a probe chunk. Every request needs the whole probe chunk, so all its tokens
        count as important.
        """
        needed = self._reader.layout.chunk_tokens
        return [(segment, PROBE, needed) for segment, _ in self.parts]
