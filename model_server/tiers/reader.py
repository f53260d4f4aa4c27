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
from model_server.tiers.tiered_prefix import PROBE, ChunkKey, LayerRead, TieredPrefix

_CPU = torch.device("cpu")

_PATIENCE_S = 60.0
"""The longest wait for one layer's read. Requests lose this time once to a disk that hangs, and then compute
their prefixes.
"""

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
        self._earlier: dict[Segment, list[dict[int, int]]] = {}
        """How often the tokens of each chunk were read before the chunk was made, for each layer of a
        segment.
        """
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
        assert self._earlier.keys() <= self._known
        assert {key[0] for key in self._held} <= self._known
        self._learnt.check_integrity()

    def _fetch(self, layer: int, work: LayerRead) -> list[torch.Tensor]:
        return [self._chunk((segment, layer, chunk), important) for segment, chunk, important in work]

    def _chunk(self, key: ChunkKey, num_important: int) -> torch.Tensor:
        segment, layer, chunk = key
        content = self._held.get(key)
        if content is None:
            content = _from_disk(key)
        self._known.add(segment)
        earlier = 0.0 if key in self._placement else self._earlier_uses(segment)[layer].get(chunk, 0)
        tier, moved = self._placement.use(
            key, size_bytes=len(content), num_important=num_important, earlier=earlier, node=segment
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

    def _earlier_uses(self, segment: Segment) -> list[dict[int, int]]:
        """Return how often the tokens of each chunk were used before, for each layer, as known at the first
        use of a chunk of the segment. So the counts do not start at zero after a reordering.
        """
        if (known := self._earlier.get(segment)) is not None:
            return known
        earlier: list[dict[int, int]] = [{} for _ in segment.orders]
        if (importance := self._learnt.known(segment.place.hashes)) is not None:
            size = self.store.layout.chunk_tokens
            for layer, order in enumerate(segment.orders):
                counts = earlier[layer]
                counts[PROBE] = size * importance.num_requests
                for slot, uses in zip(order.slots, importance.reads(layer), strict=True):
                    counts[slot // size] = counts.get(slot // size, 0) + uses
        self._earlier[segment] = earlier
        return earlier

    def _learn(self, parts: Sequence[tuple[Segment, int]], choices: dict[int, Choice]) -> None:
        weights = [choices[layer].importance for layer in sorted(choices)]
        start = 0
        for segment, num_blocks in parts:
            end = start + num_blocks * self.store.layout.block_tokens
            if all(layer is not None for layer in weights):
                own = [layer[start:end].tolist() for layer in weights if layer is not None]
                read = [_own_tokens(choices[layer].tokens, start, end) for layer in sorted(choices)]
                self._learnt.record(segment.place.hashes, own, chosen=read)
            start = end

    def _new_orders(self, old: Segment) -> list[TokenOrder] | None:
        orders = self._learnt.orders(old.place.hashes)
        return None if orders == old.orders else orders

    def _forget_replaced(self) -> None:
        """Forget the chunks of segments that were reordered, split or removed."""
        there = set(self.store.segments())
        gone = self._known - there
        layout = self.store.layout
        for segment in gone:
            chunks = range(PROBE, layout.num_chunks(segment.num_tokens))
            keys = [(segment, layer, chunk) for layer in range(layout.num_layers) for chunk in chunks]
            self._placement.forget(keys)
            for key in keys:
                self._held.pop(key, None)
            self._earlier.pop(segment, None)
        self._known -= gone
        if gone:
            self._learnt.keep({segment.place.hashes[0] for segment in there})


def _from_disk(key: ChunkKey) -> torch.Tensor:
    segment, layer, chunk = key
    read = segment.probe(layer) if chunk == PROBE else segment.chunk(layer, chunk)
    return torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else torch.empty(0, dtype=torch.uint8)


def _own_tokens(tokens: torch.Tensor | None, start: int, end: int) -> list[int]:
    """Return the tokens in [start, end), counted from `start`. None means all tokens."""
    if tokens is None:
        return list(range(end - start))
    own: list[int] = (tokens[(tokens >= start) & (tokens < end)] - start).tolist()
    return own
