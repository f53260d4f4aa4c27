"""Runs the tiers under a running engine. Prefixes that left the engine's blocks are loaded back, and computed
prefixes are stored. Three threads call this module. Each calls its own methods:
- the loader's thread (`fetch`, `learn_from`, `close`) may wait for the disk. It reads and checks
  the prefix of a waiting request before the request is admitted. So neither the engine nor another request
  waits for a disk, and a damaged file only means that the prefix is computed;
- the step's thread (`execute`, `save`) copies loaded content into blocks, then computes the step. Then it
  copies finished prompts out of the blocks, which no request can overwrite before the next step, and hands
  them to the writer;
- the event loop's thread (`num_held`, `status`) only reads state, and never waits.

A prefix is stored when its prompt is computed, not when its blocks are about to be reused. Otherwise the
eviction would have to wait for the copy in the middle of a step, and a process that dies would lose all KV
that was still in memory.

Only exact prefixes are stored.

Callers: the server.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from model_server.core.blocks import Block
from model_server.core.engine import Runner, StepResult
from model_server.core.hashing import BlockHash
from model_server.core.kv_cache import PrefixLoad
from model_server.core.request import LoadedPrefix, OutsidePrefix, Request
from model_server.core.scheduler import Chunk, StepPlan
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.model import PagedModel
from model_server.runners.hf.views import KvView
from model_server.tiers.errors import DamagedSegmentError, StoreError
from model_server.tiers.health import Health
from model_server.tiers.placement import SCORES
from model_server.tiers.reader import TieredPrefix, TieredReader
from model_server.tiers.records import Records
from model_server.tiers.segment import LayerRecords
from model_server.tiers.selection import num_probe_kv_heads, probe
from model_server.tiers.settings import KvStoreSettings
from model_server.tiers.status import StoreStatus
from model_server.tiers.store import PrefixStore
from model_server.tiers.view import SelectiveView, UnreadableError
from model_server.tiers.writer import BackgroundWriter, PendingBlocks

_RECOMPUTED_AT_ONCE = 512
"""The most tokens computed at once if a prefix has to be computed in the middle of a step because its load
has failed.
"""

_LAST_NODE_S = 10.0
"""The time for the node that is being written when the store closes."""

_log = logging.getLogger(__name__)


class ServedTiers:
    def __init__(
        self,
        model: PagedModel,
        settings: KvStoreSettings,
        *,
        runner: Runner,
        fingerprint: str,
        clock: Callable[[], float],
    ) -> None:
        """`runner` computes the steps between the copies. Raise LayoutMismatchError or StoreError if the
        folder belongs to another model or another process.
        """
        config, shape = model.module.config, model.memory.shape
        self.settings = settings
        self._selection = settings.selection
        self._group = int(config.num_attention_heads) // shape.num_kv_heads
        probed = num_probe_kv_heads(
            settings,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=shape.num_kv_heads,
        )
        self._records = Records(shape=shape, probe_kv_heads=probed)
        layout = self._records.layout(
            fingerprint, block_tokens=model.memory.block_size_tokens, chunk_tokens=settings.chunk_tokens
        )
        self.store = PrefixStore(settings.folder, layout, capacity_bytes=settings.size_bytes)
        self.reader = TieredReader(
            self.store,
            self._records,
            settings,
            capacities_bytes=(settings.device_bytes, settings.cpu_bytes),
            score=SCORES[settings.score],
            # Content that is loaded whole waits in main memory for its blocks. Only selective reads are used
            # on the device.
            device=model.memory.device if self._selection else torch.device("cpu"),
        )
        self.writer = BackgroundWriter(self.store, capacity_bytes=settings.pending_bytes, clock=clock)
        self._model = model
        self._runner = runner
        self.clock = clock
        self._health = Health()
        self._counts = StoreStatus()

    # The event loop's thread.

    @property
    def approximation(self) -> str:
        """Return the name of the way in which KV that is computed after a load differs from exact KV. Empty
        means that it is exact.
        """
        return self._selection.cache_key if self._selection else ""

    @property
    def bytes_per_block(self) -> int:
        return self._records.shape.bytes_per_token * self.store.layout.block_tokens

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a prefix's first blocks could be loaded now."""
        return self.store.num_held(hashes) if self._health.may_try(now=self.clock()) else 0

    def status(self) -> StoreStatus:
        written = self.writer.counts
        return replace(
            self._counts,
            used_bytes=self.store.used_bytes,
            found_chunks=(self.reader.found_in[0], self.reader.found_in[1], self.reader.found_in[2]),
            read_bytes=self.store.disk.counts.bytes,
            written_bytes=written.written_bytes,
            dropped_blocks=written.dropped_blocks,
            write_failures=written.failures,
            usable=self.writer.usable and self._health.may_try(now=self.clock()),
        )

    # The loader's thread.

    def fetch(self, hashes: Sequence[BlockHash], *, first_block: int) -> LoadedPrefix | OutsidePrefix | None:
        """Return the stored part of a prefix whose first `first_block` blocks are known already. Return None
        if the store has no more blocks than these.
        """
        prefix = None
        if not self._health.may_try(now=self.clock()):
            return None
        try:
            prefix = self.reader.open(hashes)
            if prefix is None or prefix.num_tokens <= first_block * self.store.layout.block_tokens:
                return None
            if self._selection:
                return self._open(prefix)
            return self._load(prefix, first_block)
        except (StoreError, OSError) as error:
            self._failed(prefix, error)
            return None

    def _load(self, prefix: TieredPrefix, first_block: int) -> LoadedPrefix:
        size = self.store.layout.block_tokens
        tokens = torch.arange(first_block * size, prefix.num_tokens)
        prefix.foresee(tokens)
        content = []
        for layer in range(self._records.shape.num_layers):
            keys, values = prefix.read(layer, tokens)
            # `contiguous` copies the values. A view would keep the whole read in memory, keys included.
            content.append((keys, values.contiguous()))
        self._health.worked()
        self._counts.exact_loads += 1
        size_bytes = len(tokens) * self._records.shape.bytes_per_token
        return LoadedPrefix(first_block, prefix.num_tokens // size, size_bytes, content)

    def _open(self, prefix: TieredPrefix) -> OutsidePrefix:
        assert self._selection is not None
        choose = partial(probe, settings=self._selection, group=self._group)
        self._counts.selective_loads += 1
        return OutsidePrefix(
            prefix.num_tokens // self.store.layout.block_tokens, SelectiveView(prefix, choose)
        )

    def _failed(self, prefix: TieredPrefix | None, error: Exception) -> None:
        """Record a failed read. Damaged nodes are dropped; a disk that cannot be read is not used for a
        while.
        """
        self._counts.load_failures += 1
        if not isinstance(error, DamagedSegmentError):
            pause_s = self._health.failed(now=self.clock())
            _log.error("the KV store cannot be read: %s; it is not used for %.0f s", error, pause_s)
            return
        _log.warning("a stored prefix was damaged, so it was dropped: %s", error)
        self.store.drop_unreadable(segment for segment, _ in (prefix.parts if prefix else ()))

    def learn_from(self, request: Request) -> None:
        """Count for later requests the tokens that mattered to this request's first tokens in a selective
        load. Then reorder a node that is due. A node has at most `writer.NODE_TOKENS` tokens, and a node with
        n requests was reordered log2(n) times at most. So fetches wait seldom, and for one node at most. Call
        this when the request's prompt is computed.
        """
        if isinstance(request.stored, OutsidePrefix):
            self._health.worked()  # The request has read the prefix by now. `fetch` only opened it.
            view = _view_of(request)
            self.reader.finish(_prefix_of(view), view.choices.items())
            try:
                self._counts.reordered_nodes += self.reader.reorder_next()
            except (StoreError, OSError) as error:
                self._failed(_prefix_of(view), error)

    # The step's thread.

    def execute(self, plan: StepPlan) -> StepResult:
        for load in plan.loads:
            self._copy_in(load)
        while True:
            try:
                result = self._runner.execute(plan)
                break
            except UnreadableError as failed:
                self._failed(_prefix_of(_view_of(failed.request)), failed.error)
                self._compute_prefix(plan, failed.request)
        for chunk in plan.chunks:
            request, end = chunk.request, chunk.start + chunk.num_tokens
            if chunk.samples and chunk.start < request.num_prompt_tokens <= end:
                self.save(request, chunk.table, num_tokens=end)
        return result

    def save(self, request: Request, table: Sequence[Block], *, num_tokens: int) -> None:
        """Give the writer the full blocks of the request that the store does not have."""
        if request.approximation:
            return
        hashes = request.block_hashes[: num_tokens // self.store.layout.block_tokens]
        first = self.store.num_held(hashes)
        while first < len(hashes) and self.writer.is_on_the_way(hashes[first]):
            first += 1
        size_bytes = (len(hashes) - first) * self.bytes_per_block
        if not size_bytes:
            return
        # Without room, nothing is copied, and `offer` only counts the lost blocks.
        content = self._copy_out(table[first : len(hashes)]) if self.writer.has_room(size_bytes) else None

        def records(start: int, end: int) -> Sequence[LayerRecords]:
            assert content is not None
            return self._records.of_blocks(content[:, :, start - first : end - first])

        self.writer.offer(PendingBlocks(tuple(hashes), first, size_bytes, records))

    def _copy_in(self, load: PrefixLoad) -> None:
        memory, content = self._model.memory, load.prefix.content
        assert isinstance(content, list)
        slots = _slots(load.blocks, memory)
        skipped = (load.first_block - load.prefix.first_block) * memory.block_size_tokens
        with torch.inference_mode():
            for layer, (keys, values) in enumerate(content):
                memory.write(
                    layer, slots, keys[skipped:].to(memory.device), values[skipped:].to(memory.device)
                )

    def _copy_out(self, blocks: Sequence[Block]) -> torch.Tensor:
        """Return the blocks as (layer, keys and values, block, slot, head, dim), on the CPU."""
        memory = self._model.memory
        numbers = torch.tensor([block.block_id for block in blocks], device=memory.device)
        with torch.inference_mode():
            copied: torch.Tensor = memory.data.index_select(2, numbers).cpu()
        return copied

    def _compute_prefix(self, plan: StepPlan, request: Request) -> None:
        """Compute the prefix into the request's own blocks at these places. From now on the request reads its
        blocks like any other request.
        """
        [table] = [chunk.table for chunk in plan.chunks if chunk.request is request]
        assert isinstance(request.stored, OutsidePrefix)
        num_tokens = request.stored.num_blocks * self.store.layout.block_tokens
        request.stored = None
        if request.num_cached_tokens is not None:
            request.num_cached_tokens -= request.num_stored_tokens
            request.num_stored_tokens = 0
        for start in range(0, num_tokens, _RECOMPUTED_AT_ONCE):
            count = min(_RECOMPUTED_AT_ONCE, num_tokens - start)
            self._model.forward(StepPlan((Chunk(request, start, count, False, table),)))

    def close(self, *, timeout_s: float) -> None:
        """Write the waiting prefixes, as far as the time allows. If a thread still writes after this time,
        the folder stays in use until the process ends.
        """
        if not self.writer.drain(timeout_s=timeout_s):
            _log.warning("not all prefixes were stored within %.0f s", timeout_s)
        if not self.writer.close(timeout_s=min(timeout_s, _LAST_NODE_S)):
            _log.warning(
                "a node is still being written; %s is in use until the process ends", self.store.folder
            )
            return
        self.reader.close()
        self.store.close()


def view_for(request: Request) -> KvView | None:
    """Return the view of a request whose prefix is read selectively."""
    return _view_of(request) if isinstance(request.stored, OutsidePrefix) else None


def _view_of(request: Request) -> SelectiveView:
    assert isinstance(request.stored, OutsidePrefix)
    assert isinstance(request.stored.view, SelectiveView)
    return request.stored.view


def _prefix_of(view: SelectiveView) -> TieredPrefix:
    assert isinstance(view.source, TieredPrefix)
    return view.source


def _slots(blocks: Sequence[Block], memory: KvMemory) -> torch.Tensor:
    first = torch.tensor([block.block_id for block in blocks], device=memory.device)
    size = memory.block_size_tokens
    return (first[:, None] * size + torch.arange(size, device=memory.device)).flatten()
