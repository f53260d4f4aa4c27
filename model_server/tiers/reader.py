"""Reads prefixes through the tiers. A request first reads the probed keys of every token, then only the
chunks that hold chosen tokens. `TieredReader` owns the fast tiers above one store: the resident chunks, the
importance of every token of a node so far, and one thread that does all reads. While a layer computes, this
thread already fetches the probed keys of the next layers. A `TieredPrefix` is the view of one request.

Only that thread uses the state of the reader, so no lock is needed. Callers on other threads wait for this
thread, but not forever.

Invariants (`check_integrity`, between requests): the held chunks are exactly those that are placed in a fast
tier, and each has its size; only segments of the store are known.

Callers: code that makes views for requests; the benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from model_server.core.hashing import BlockHash
from model_server.tiers.layout import TokenOrder
from model_server.tiers.learnt import Learnt
from model_server.tiers.placement import Score, TieredPlacement, by_uses_and_importance
from model_server.tiers.records import Records
from model_server.tiers.segment import KvLayout, Segment
from model_server.tiers.selection import Choice
from model_server.tiers.settings import SelectionSettings
from model_server.tiers.store import PrefixStore

_CPU = torch.device("cpu")

_PATIENCE_S = 60.0
"""The longest wait for one layer's read. Requests lose this time once to a disk that hangs, and then compute
their prefixes.
"""

PROBE = -1
"""The number of the chunk that holds a layer's probed keys."""

ChunkKey = tuple[Segment, int, int]
"""The key of a chunk holds the segment, the layer and the number of the chunk."""

LayerRead = Sequence[tuple[Segment, int, int]]
"""The chunks in the order in which they are wanted: (segment, chunk, how many chosen tokens it holds)."""

_T = TypeVar("_T")


class TieredReader:
    def __init__(
        self,
        store: PrefixStore,
        records: Records,
        settings: SelectionSettings,
        *,
        capacities_bytes: Sequence[int],
        score: Score = by_uses_and_importance,
        layers_ahead: int = 2,
        device: torch.device = _CPU,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`capacities_bytes` are the sizes of the GPU tier (main memory if the model computes on the CPU) and
        of the CPU tier. The model computes on `device`, where the chunks of the first tier are kept and the
        results of reads are returned. A read that takes longer than `patience_s` raises TimeoutError in its
        caller.
        """
        self.store = store
        self.records = records
        self.settings = settings
        self.layers_ahead = layers_ahead
        self.device = device
        self.patience_s = patience_s
        self.found_in = [0] * (len(capacities_bytes) + 1)
        """The number of chunks that were read from each tier, the disk last."""
        self._placement: TieredPlacement[ChunkKey] = TieredPlacement(capacities_bytes, score=score)
        self._held: dict[ChunkKey, torch.Tensor] = {}
        self._known: set[Segment] = set()
        self._learnt = Learnt(num_layers=store.layout.num_layers, block_tokens=store.layout.block_tokens)
        self._hanging: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tiers")

    @property
    def layout(self) -> KvLayout:
        return self.store.layout

    def open(self, hashes: Sequence[BlockHash]) -> TieredPrefix | None:
        """Return the stored part of a prefix. Return None if nothing is stored."""
        parts = self.store.match(hashes)
        if not parts:
            return None
        self.wait_for(self._thread.submit(self._forget_replaced))
        return TieredPrefix(self, parts)

    def wait_for(self, work: Future[_T]) -> _T:
        """Return the result of work in the reader's thread. Raise TimeoutError or another OSError if the disk
        hangs. Work is done in the order in which it came. So while one piece of work hangs, no caller waits
        for the pieces behind it.
        """
        hangs = self._hanging is not None and not self._hanging.done()
        try:
            return work.result(timeout=0 if hangs else self.patience_s)
        except TimeoutError as error:
            if not hangs:
                self._hanging = work
            raise TimeoutError(f"the store had no answer within {self.patience_s:g} s") from error

    def submit(self, layer: int, work: LayerRead) -> Future[list[torch.Tensor]]:
        return self._thread.submit(self._fetch, layer, work)

    def finish(self, prefix: TieredPrefix, choices: Iterable[tuple[int, Choice]]) -> None:
        """Add the weights of a request's choices to the running means. Call this when the first tokens of the
        request are computed.
        """
        self.wait_for(self._thread.submit(self._learn, prefix.parts, dict(choices)))

    def reorder(self) -> int:
        """Pack the important tokens of every used node into dense chunks. Return the number of reordered
        nodes. Any thread may call this.
        """
        return sum(self._reorder(old) for old in self.store.segments())

    def reorder_next(self) -> bool:
        """Reorder one node that is due. Return False if no node is due. Raise DamagedSegmentError or OSError
        for errors of the disk. Only one thread may call this at a time.
        """
        while (name := self._thread.submit(self._learnt.next_due).result()) is not None:
            if (segment := self.store.find(name)) is not None and self._reorder(segment):
                return True
        return False

    def _reorder(self, old: Segment) -> bool:
        """Reorder a node. The fast tiers forget its chunks, since the new chunks hold other tokens."""
        orders = self._thread.submit(self._new_orders, old).result()
        if orders is None:
            return False
        reordered = self.store.reorder(old, orders) is not None
        self._thread.submit(self._forget_replaced).result()
        return reordered

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
            held.device.type == (self.device if self._placement.tier_of(key) == 0 else _CPU).type
            for key, held in self._held.items()
        )
        assert {key[0] for key in self._held} <= self._known
        self._learnt.check_integrity()

    def _fetch(self, layer: int, work: LayerRead) -> list[torch.Tensor]:
        return [self._chunk((segment, layer, chunk), important) for segment, chunk, important in work]

    def _chunk(self, key: ChunkKey, num_important: int) -> torch.Tensor:
        content = self._held.get(key)
        if content is None:
            content = _from_disk(key)
        self._known.add(key[0])
        tier, moved = self._placement.use(
            key, size_bytes=len(content), num_important=num_important, node=key[0]
        )
        self.found_in[tier] += 1
        self._settle(key, content, moved)
        return content

    def _settle(self, key: ChunkKey, content: torch.Tensor, moved: dict[ChunkKey, int]) -> None:
        self._held[key] = content
        for other, now in moved.items():
            held = self._held.pop(other)
            if now < self._placement.num_tiers:
                self._held[other] = held.to(self.device if now == 0 else _CPU)

    def _learn(self, parts: Sequence[tuple[Segment, int]], choices: dict[int, Choice]) -> None:
        weights = [choices[layer].importance for layer in sorted(choices)]
        start = 0
        for segment, num_blocks in parts:
            end = start + num_blocks * self.store.layout.block_tokens
            if all(layer is not None for layer in weights):
                own = [layer[start:end].tolist() for layer in weights if layer is not None]
                self._learnt.record(segment.place.hashes, own)
            start = end

    def _new_orders(self, old: Segment) -> list[TokenOrder] | None:
        orders = self._learnt.orders(old.place.hashes)
        return None if orders == old.orders else orders

    def _forget_replaced(self) -> None:
        """Forget the chunks of segments that were reordered or removed."""
        there = set(self.store.segments())
        gone = self._known - there
        layout = self.store.layout
        for segment in gone:
            chunks = range(PROBE, layout.num_chunks(segment.num_tokens))
            keys = [(segment, layer, chunk) for layer in range(layout.num_layers) for chunk in chunks]
            self._placement.forget(keys)
            for key in keys:
                self._held.pop(key, None)
        self._known -= gone
        if gone:
            self._learnt.keep({segment.place.hashes[0] for segment in there})


class TieredPrefix:
    """The `PrefixSource` of one request: layer by layer, first the probed keys, then the chosen tokens.
    Layers are asked for in ascending order.
    """

    def __init__(self, reader: TieredReader, parts: Sequence[tuple[Segment, int]]) -> None:
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


def _from_disk(key: ChunkKey) -> torch.Tensor:
    segment, layer, chunk = key
    read = segment.probe(layer) if chunk == PROBE else segment.chunk(layer, chunk)
    return torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else torch.empty(0, dtype=torch.uint8)
