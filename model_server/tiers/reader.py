"""Prefixes read through the tiers: probed keys of every token, then only the chunks that hold chosen ones.

`TieredReader` owns the fast tiers over one store: what is resident, what every token of a node mattered so far, and one thread
that does all reads. While a layer computes, that thread already fetches the probed keys of the next ones. `TieredPrefix` is one request's prefix, a source for its view.

Everything but `open` and `close` runs in the reader's own thread, so nothing here needs a lock.

Invariants (`check_integrity`, between requests): exactly the chunks that are placed in a fast tier are held, each of its size; only
segments that the store has are known.

Callers: whoever makes views for requests; the benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from model_server.core.hashing import BlockHash
from model_server.runners.hf.memory import KvMemory, KvShape
from model_server.tiers.importance import NodeImportance
from model_server.tiers.layout import TokenOrder
from model_server.tiers.placement import Score, TieredPlacement, by_importance
from model_server.tiers.segment import KvLayout, LayerRecords, Segment
from model_server.tiers.selection import Choice
from model_server.tiers.settings import SelectionSettings
from model_server.tiers.store import PrefixStore

_PROBE = -1
"""The number of the chunk that holds a layer's probed keys."""

_ChunkKey = tuple[Segment, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """How keys and values become records, for one model."""

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

    def of_memory(self, memory: KvMemory, blocks: torch.Tensor) -> list[LayerRecords]:
        """Of whole blocks, in the order of `blocks`."""
        layers = []
        for layer in range(self.shape.num_layers):
            keys, values = (read.flatten(0, 1).cpu() for read in memory.read(layer, blocks))
            rest = torch.cat((keys[:, self.probe_kv_heads :], values), dim=1)
            layers.append(LayerRecords(_bytes(keys[:, : self.probe_kv_heads]), _bytes(rest)))
        return layers

    def of_blocks(self, content: torch.Tensor) -> list[LayerRecords]:
        """Of blocks that were copied out of a memory: (layer, keys and values, block, slot, head, dim), on the CPU."""
        layers = []
        for layer in content:
            keys, values = (part.flatten(0, 1) for part in layer)
            rest = torch.cat((keys[:, self.probe_kv_heads :], values), dim=1)
            layers.append(LayerRecords(_bytes(keys[:, : self.probe_kv_heads]), _bytes(rest)))
        return layers

    def tensor(self, content: torch.Tensor, *, num_heads: int) -> torch.Tensor:
        """Bytes as (tokens, heads, dim)."""
        if not len(content) or not num_heads:
            return torch.empty(
                0, num_heads, self.shape.head_dim, dtype=self.shape.dtype, device=content.device
            )
        return content.view(self.shape.dtype).view(-1, num_heads, self.shape.head_dim)


_CPU = torch.device("cpu")


def _bytes(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return content


class TieredReader:
    def __init__(
        self,
        store: PrefixStore,
        records: Records,
        settings: SelectionSettings,
        *,
        capacities_bytes: Sequence[int],
        score: Score = by_importance,
        layers_ahead: int = 2,
        device: torch.device = _CPU,
    ) -> None:
        """`capacities_bytes`: GPU (in main memory too, where the model computes on the CPU), then CPU.

        `device`: where the model computes. The first tier's chunks are kept there, and what is read is given there.
        """
        self.store = store
        self.records = records
        self.settings = settings
        self.layers_ahead = layers_ahead
        self.device = device
        self.found_in = [0] * (len(capacities_bytes) + 1)
        """Chunks read from each tier, disk last."""
        self._placement: TieredPlacement[_ChunkKey] = TieredPlacement(capacities_bytes, score=score)
        self._held: dict[_ChunkKey, torch.Tensor] = {}
        self._known: set[Segment] = set()
        self._importance: dict[BlockHash, tuple[tuple[BlockHash, ...], NodeImportance]] = {}
        self._top_in_chunk: dict[Segment, list[dict[int, int]]] = {}
        """How many of a layer's most important tokens each chunk of a segment holds."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tiers")

    def open(self, hashes: Sequence[BlockHash]) -> TieredPrefix | None:
        """What is stored of a prefix; None where nothing is."""
        parts = self.store.match(hashes)
        if not parts:
            return None
        self._thread.submit(self._forget_replaced).result()
        return TieredPrefix(self, parts)

    def submit(self, layer: int, work: _LayerRead) -> Future[list[torch.Tensor]]:
        return self._thread.submit(self._fetch, layer, work)

    def finish(self, prefix: TieredPrefix, choices: Iterable[tuple[int, Choice]]) -> None:
        """A request's first tokens are computed: what its choices looked at becomes part of the running means."""
        self._thread.submit(self._learn, prefix.parts, dict(choices)).result()

    def reorder(self) -> int:
        """Pack what mattered into dense chunks, in every node that has been used. Gives how many nodes. Any thread may call it."""
        done = 0
        for old in self.store.segments():
            if (orders := self._thread.submit(self._orders, old).result()) is not None:
                done += self.store.reorder(old, orders) is not None
        self._thread.submit(self._forget_replaced).result()
        return done

    def resident_bytes(self, tier: int) -> int:
        return self._placement.resident_bytes(tier)

    def close(self) -> None:
        self._thread.shutdown()

    def check_integrity(self) -> None:
        self._thread.submit(self._check).result()

    def _check(self) -> None:
        self._placement.check_integrity()
        tiers = self._placement.num_tiers
        assert all(self._placement.tier_of(key) < tiers for key in self._held)
        resident = sum(self._placement.resident_bytes(tier) for tier in range(tiers))
        assert sum(map(len, self._held.values())) == resident
        on_device = sum(len(held) for key, held in self._held.items() if self._placement.tier_of(key) == 0)
        assert not tiers or on_device == self._placement.resident_bytes(0)
        assert all(
            held.device == (self.device if self._placement.tier_of(key) == 0 else _CPU)
            for key, held in self._held.items()
        )
        assert self._top_in_chunk.keys() <= self._known
        assert {key[0] for key in self._held} <= self._known
        for hashes, importance in self._importance.values():
            importance.check_integrity()
            assert len(hashes) * self.store.layout.block_tokens == importance.num_tokens

    def _fetch(self, layer: int, work: _LayerRead) -> list[torch.Tensor]:
        return [self._chunk((segment, layer, chunk), important) for segment, chunk, important in work]

    def _chunk(self, key: _ChunkKey, num_important: int) -> torch.Tensor:
        segment, layer, chunk = key
        content = self._held.get(key)
        if content is None:
            read = segment.probe(layer) if chunk == _PROBE else segment.chunk(layer, chunk)
            content = (
                torch.frombuffer(bytearray(read), dtype=torch.uint8)
                if read
                else torch.empty(0, dtype=torch.uint8)
            )
        self._known.add(segment)
        if (counts := self._important_in(segment)) is not None:
            num_important = counts[layer].get(chunk, 0)
        tier, moved = self._placement.use(key, size_bytes=len(content), num_important=num_important)
        self.found_in[tier] += 1
        self._held[key] = content
        for other, now in moved.items():
            held = self._held.pop(other)
            if now < self._placement.num_tiers:
                self._held[other] = held.to(self.device if now == 0 else _CPU)
        return content

    def _important_in(self, segment: Segment) -> list[dict[int, int]] | None:
        """For each layer, chunk by chunk; None before the node's first request."""
        if (known := self._top_in_chunk.get(segment)) is not None:
            return known
        known_importance = self._importance.get(segment.place.hashes[0])
        if known_importance is None or known_importance[1].num_tokens != segment.num_tokens:
            return None
        size, kept = self.store.layout.chunk_tokens, self.settings.kept(segment.num_tokens)
        counts = []
        for layer, order in enumerate(segment.orders):
            top = known_importance[1].top(layer, kept)
            counts.append({_PROBE: len(top), **order.important_by_chunk(top, chunk_tokens=size)})
        self._top_in_chunk[segment] = counts
        return counts

    def _learn(self, parts: Sequence[tuple[Segment, int]], choices: dict[int, Choice]) -> None:
        weights = [choices[layer].importance for layer in sorted(choices)]
        start = 0
        for segment, num_blocks in parts:
            end = start + num_blocks * self.store.layout.block_tokens
            if num_blocks == len(segment.place.hashes) and all(layer is not None for layer in weights):
                own = [layer[start:end].tolist() for layer in weights if layer is not None]
                self._own_importance(segment).record(own)
                self._known.add(segment)
                self._top_in_chunk.pop(segment, None)
                self._important_in(segment)
            start = end

    def _own_importance(self, segment: Segment) -> NodeImportance:
        """A node that was split since takes its tokens' means along."""
        name, hashes = segment.place.hashes[0], segment.place.hashes
        known = self._importance.get(name)
        if known is None:
            fresh = NodeImportance(num_layers=self.store.layout.num_layers, num_tokens=segment.num_tokens)
            self._importance[name] = hashes, fresh
            return fresh
        if known[1].num_tokens > segment.num_tokens:
            head, tail = known[1].split(segment.num_tokens)
            rest = known[0][len(hashes) :]
            self._importance[rest[0]] = rest, tail
            self._importance[name] = hashes, head
        return self._importance[name][1]

    def _orders(self, segment: Segment) -> list[TokenOrder] | None:
        known = self._importance.get(segment.place.hashes[0])
        if known is None or known[1].num_tokens != segment.num_tokens:
            return None
        return [
            TokenOrder.by_importance(known[1].means(layer)) for layer in range(self.store.layout.num_layers)
        ]

    def _forget_replaced(self) -> None:
        """Chunks of segments that were reordered, split or removed are nobody's any more."""
        gone = self._known - set(self.store.segments())
        layout = self.store.layout
        for segment in gone:
            chunks = range(_PROBE, layout.num_chunks(segment.num_tokens))
            keys = [(segment, layer, chunk) for layer in range(layout.num_layers) for chunk in chunks]
            self._placement.forget(keys)
            for key in keys:
                self._held.pop(key, None)
            self._top_in_chunk.pop(segment, None)
        self._known -= gone


_LayerRead = Sequence[tuple[Segment, int, int]]
"""(segment, chunk, how many chosen tokens it holds), in the order in which they are wanted."""


class TieredPrefix:
    """`PrefixSource` over the tiers, for one request. Layers are asked for in ascending order."""

    def __init__(self, reader: TieredReader, parts: Sequence[tuple[Segment, int]]) -> None:
        self.parts = parts
        self._reader = reader
        self._records = reader.records
        self._block_tokens = reader.store.layout.block_tokens
        self._probes: dict[int, Future[list[torch.Tensor]]] = {}
        self._probed: dict[int, torch.Tensor] = {}
        self._reads: dict[int, Future[list[torch.Tensor]]] = {}
        self._foreseen: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return sum(num_blocks for _, num_blocks in self.parts) * self._block_tokens

    def foresee(self, tokens: torch.Tensor) -> None:
        """Every layer will read just these: they are fetched ahead, without waiting for anybody's choice."""
        self._foreseen = tokens

    def probe_keys(self, layer: int) -> torch.Tensor:
        shape, heads, device = self._records.shape, self._records.probe_kv_heads, self._reader.device
        if not heads:
            return torch.empty(self.num_tokens, 0, shape.head_dim, dtype=shape.dtype, device=device)
        for ahead in self._ahead(layer):
            if ahead not in self._probes:
                self._probes[ahead] = self._reader.submit(ahead, self._probe_read())
        keys = [
            self._records.tensor(content.to(device), num_heads=heads)[: num_blocks * self._block_tokens]
            for content, (_, num_blocks) in zip(self._probes[layer].result(), self.parts, strict=True)
        ]
        probed = self._probed[layer] = torch.cat(keys)
        return probed

    def chunks(self, layer: int) -> torch.Tensor:
        layout = self._reader.store.layout
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
            assert torch.equal(chosen, self._foreseen), "what was foreseen is what is read"
            for ahead in self._ahead(layer):
                if ahead not in self._reads:
                    self._reads[ahead] = self._reader.submit(ahead, self._wanted(ahead, chosen)[0])
        wanted, rows = self._wanted(layer, chosen)
        reading = self._reads.pop(layer, None) or self._reader.submit(layer, wanted)
        others = self._records.shape.num_kv_heads - self._records.probe_kv_heads
        heads = others + self._records.shape.num_kv_heads
        device = self._reader.device
        stored = torch.cat([content.to(device) for content in reading.result()])
        rest = self._records.tensor(stored, num_heads=heads)[rows.to(device)]
        return torch.cat((probed[chosen.to(device)], rest[:, :others]), dim=1), rest[:, others:]

    def _ahead(self, layer: int) -> range:
        return range(layer, min(layer + self._reader.layers_ahead + 1, self._records.shape.num_layers))

    def _wanted(self, layer: int, chosen: torch.Tensor) -> tuple[_LayerRead, torch.Tensor]:
        """The chunks to read, and where each chosen token is among all that they hold."""
        layout = self._reader.store.layout
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

    def _probe_read(self) -> _LayerRead:
        kept = self._reader.settings.kept
        return [(segment, _PROBE, kept(segment.num_tokens)) for segment, _ in self.parts]
