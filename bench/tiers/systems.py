"""Serves a stored prefix in several ways, over stores of one shape's KV, with the choices that follow from
recorded patterns.

These parts are real: segments on disk with records of the shape's size, the tiers, every read and its bytes,
and the choice from the weights. Two things are given. The weights are those of SmolLM2 (`patterns.py`): its
layers are spread over the shape's layers, and its first three heads stand for the shape's. The content of the
KV is random. So this bench says nothing about answers; `bench_accuracy.py` measures these on the real model.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.tiers.disks import SwitchedDisk
from bench.tiers.patterns import PROBED_HEADS, Patterns
from bench.tiers.shapes import Compute
from model_server.core.hashing import BlockHash
from model_server.runners.hf.memory import KvShape
from model_server.tiers.placement import ChunkUse, Score, by_product, by_uses_and_importance
from model_server.tiers.reader import TieredPrefix, TieredReader
from model_server.tiers.records import Records
from model_server.tiers.segment import LayerRecords
from model_server.tiers.selection import Choice, choose
from model_server.tiers.settings import SelectionSettings
from model_server.tiers.store import PrefixStore

BLOCK, CHUNK, SINKS = 16, 16, 4
CHUNK_SHARE = 0.98


def by_uses(use: ChunkUse) -> float:
    """LFU that counts the uses of all chunks on disk."""
    return use.num_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    looks: str
    """The keys at which the choice looks: the keys of three heads (`probe`), of `all heads`, or none. The
    systems that look at none are `window`, `nothing` (everything is loaded) and `recompute`.
    """
    packed: bool = False
    score: Score = by_uses
    chunk_share: float = 1.0

    def probe_heads(self, num_heads: int) -> int:
        return {"probe": PROBED_HEADS, "all heads": num_heads}.get(self.looks, 0)


RECOMPUTE = System(name="recompute", looks="recompute")
EVERYTHING = System(name="load everything + LFU", looks="nothing")
TOP_K = System(name="top-k of all heads + LFU", looks="all heads")
WINDOW = System(name="sinks + window + LFU", looks="window")
PROBED = System(name="+ probe", looks="probe")
PACKED = System(name="+ reordering", looks="probe", packed=True)
OURS = System(name="+ importance caching", looks="probe", packed=True, score=by_product)
FEW_CHUNKS = System(
    name="+ few chunks",
    looks="probe",
    packed=True,
    score=by_uses_and_importance,
    chunk_share=CHUNK_SHARE,
)
"""The system with the choice that our servers make."""
SYSTEMS = (RECOMPUTE, EVERYTHING, TOP_K, PROBED, PACKED, OURS, FEW_CHUNKS, WINDOW)
COUNTED = SYSTEMS[1:]


@dataclass(frozen=True, slots=True)
class Ask:
    prefix: int
    request: int
    """The number of the prefix's recorded request that this request repeats, with the same weights."""


class Traffic:
    """Draws requests, which choose a prefix by a Zipf law. Half of a prefix's recorded requests teach
    importance. The other half are measured.
    """

    def __init__(self, patterns: Patterns, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._patterns = patterns
        self._weights = [1 / (rank + 1) for rank in range(patterns.num_prefixes)]

    def taught(self) -> list[Ask]:
        """Return each teaching request, once."""
        half = range(self._patterns.num_requests // 2)
        return [Ask(prefix, request) for prefix in range(self._patterns.num_prefixes) for request in half]

    def taught_as_asked(self) -> list[Ask]:
        """Return as many requests as `taught` does, with prefixes drawn by the law. The importance then
        counts how often each prefix was used.
        """
        half = self._patterns.num_requests // 2
        return [
            Ask(self._drawn(), self._rng.randrange(half)) for _ in range(half * self._patterns.num_prefixes)
        ]

    def asked(self, count: int) -> Iterator[Ask]:
        total = self._patterns.num_requests
        for _ in range(count):
            yield Ask(self._drawn(), self._rng.randrange(total // 2, total))

    def _drawn(self) -> int:
        [prefix] = self._rng.choices(range(self._patterns.num_prefixes), self._weights)
        return prefix


class Weights:
    """The recorded weights, for the layers of a shape."""

    def __init__(self, patterns: Patterns, *, num_layers: int) -> None:
        self.num_tokens = int(patterns.mean.shape[-1])
        self.num_prefixes = patterns.num_prefixes
        self.patterns = patterns
        self._of_layer = [layer * patterns.num_layers // num_layers for layer in range(num_layers)]

    def heads(self, ask: Ask, layer: int) -> torch.Tensor:
        weights: torch.Tensor = self.patterns.heads[ask.prefix, ask.request, self._of_layer[layer]]
        return weights.float() / self.num_tokens

    def mean(self, ask: Ask, layer: int) -> torch.Tensor:
        weights: torch.Tensor = self.patterns.mean[ask.prefix, ask.request, self._of_layer[layer]]
        return weights.float() / self.num_tokens

    def choice(
        self, system: System, ask: Ask, layer: int, settings: SelectionSettings, prefix: TieredPrefix
    ) -> Choice:
        if system.looks == "probe":
            chunks = prefix.chunks(layer).cpu() if settings.chunk_share < 1 else None
            return choose(self.heads(ask, layer), settings=settings, chunks=chunks)
        if system.looks == "all heads":
            weights = self.mean(ask, layer)
            return Choice(weights.topk(settings.kept(self.num_tokens)).indices.sort().values, weights)
        return Choice(window(self.num_tokens, settings) if system.looks == "window" else None)


def window(total: int, settings: SelectionSettings) -> torch.Tensor:
    kept = settings.kept(total)
    first = min(SINKS, kept)
    return torch.tensor([*range(first), *range(total - kept + first, total)])


def name_of(prefix: int, num_tokens: int) -> list[BlockHash]:
    """Return a chain of block hashes. The names only have to be distinct."""
    return [BlockHash(f"{prefix:08}-{block:023}".encode()) for block in range(num_tokens // BLOCK)]


class Stores:
    """One store for each way in which the KV of the same prefixes can be stored on disk. The stores are built
    once, and all cells read them.
    """

    def __init__(
        self, folder: Path, shape: KvShape, weights: Weights, traffic: Traffic, disk: SwitchedDisk
    ) -> None:
        self.shape, self.weights, self.disk = shape, weights, disk
        self.bytes_per_prefix = shape.bytes_per_token * weights.num_tokens
        self._stores: dict[tuple[int, bool], PrefixStore] = {}
        for system in SYSTEMS:
            key = system.probe_heads(shape.num_kv_heads), system.packed
            if key in self._stores or system.looks == "recompute":
                continue
            store = self._stores[key] = PrefixStore(
                folder / f"{key[0]}-{key[1]}",
                self._records(system).layout(f"heads-{key[0]}", block_tokens=BLOCK, chunk_tokens=CHUNK),
                capacity_bytes=2 * self.bytes_per_prefix * weights.num_prefixes + 100_000_000,
                disk=disk,
            )
            self._fill(store)
            if system.packed:
                settings = SelectionSettings()
                reader = self.reader(system, settings, capacities_bytes=(0, 0))
                teach(reader, system, settings, weights, traffic.taught())
                assert reader.reorder() == weights.num_prefixes
                reader.close()

    def reader(
        self,
        system: System,
        settings: SelectionSettings,
        *,
        capacities_bytes: Sequence[int],
        device: torch.device | None = None,
    ) -> TieredReader:
        return TieredReader(
            self._stores[system.probe_heads(self.shape.num_kv_heads), system.packed],
            self._records(system),
            settings,
            capacities_bytes=capacities_bytes,
            score=system.score,
            device=device or torch.device("cpu"),
        )

    def close(self) -> None:
        for store in self._stores.values():
            store.check_integrity()
            store.close()

    def _records(self, system: System) -> Records:
        return Records(shape=self.shape, probe_kv_heads=system.probe_heads(self.shape.num_kv_heads))

    def _fill(self, store: PrefixStore) -> None:
        tokens, layout = self.weights.num_tokens, store.layout
        rng = random.Random(5)
        # Bytes under 0x3C make half-precision numbers of moderate size, whatever the neighbouring byte is.
        few = bytes(rng.randrange(0x3C) for _ in range(4096))

        def content(size: int) -> bytes:
            return (few * (size // len(few) + 1))[:size]

        records = LayerRecords(content(tokens * layout.probe_bytes), content(tokens * layout.rest_bytes))
        for prefix in range(self.weights.num_prefixes):
            store.put(name_of(prefix, tokens), [records] * layout.num_layers)


def teach(
    reader: TieredReader,
    system: System,
    settings: SelectionSettings,
    weights: Weights,
    asks: Sequence[Ask],
) -> None:
    """Record the choices and the attention of earlier requests, without reading for them."""
    if system.looks not in ("probe", "all heads"):
        return
    for ask in asks:
        prefix = reader.open(name_of(ask.prefix, weights.num_tokens))
        assert prefix is not None
        layers = range(reader.store.layout.num_layers)
        choices = [(layer, weights.choice(system, ask, layer, settings, prefix)) for layer in layers]
        reader.finish(prefix, choices)


@dataclass(slots=True)
class Measured:
    ttft_s: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    """The bytes that were read from disk."""
    reads: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """The chunks that the request needed, wherever they were found, without probed keys."""
    chosen_tokens: list[int] = field(default_factory=list)
    """The number of tokens that attention was given, over all layers."""


class Served:
    """Serves the requests of one cell by one system."""

    def __init__(
        self,
        system: System,
        stores: Stores,
        *,
        ratio: float,
        capacities_bytes: Sequence[int],
        new_tokens: int,
        device: torch.device,
    ) -> None:
        self.system, self.measured = system, Measured()
        self._stores, self._new_tokens = stores, new_tokens
        self._layers = stores.shape.num_layers
        self._settings = SelectionSettings(ratio=ratio, chunk_share=system.chunk_share)
        self.reader = (
            None
            if system.looks == "recompute"
            else stores.reader(system, self._settings, capacities_bytes=capacities_bytes, device=device)
        )

    def teach(self, asks: Sequence[Ask]) -> None:
        if self.reader:
            teach(self.reader, self.system, self._settings, self._stores.weights, asks)

    def ask(self, ask: Ask, compute: Compute) -> None:
        """Send one request, and note the time to its first token, its bytes and its reads."""
        counts, found = self._stores.disk.counts, sum(self.reader.found_in) if self.reader else 0
        bytes_before, reads_before = counts.bytes, counts.reads
        started = time.monotonic()
        prefix, choices = self._computed(ask, compute)
        self.measured.ttft_s.append(time.monotonic() - started)
        self.measured.bytes_read.append(counts.bytes - bytes_before)
        self.measured.reads.append(counts.reads - reads_before)
        probes = self._layers if self.system.looks in ("probe", "all heads") else 0
        total = self._stores.weights.num_tokens
        if self.reader and prefix:
            self.measured.wanted.append(sum(self.reader.found_in) - found - probes)
            self.reader.finish(prefix, enumerate(choices))
        self.measured.chosen_tokens.append(
            sum(total if choice.tokens is None else len(choice.tokens) for choice in choices)
        )

    def warmed(self) -> None:
        self.measured = Measured()

    def close(self) -> None:
        if self.reader:
            self.reader.check_integrity()
            self.reader.close()

    def _computed(self, ask: Ask, compute: Compute) -> tuple[TieredPrefix | None, list[Choice]]:
        total = self._stores.weights.num_tokens
        if self.reader is None:
            for _ in range(self._layers):
                compute.layer(total + self._new_tokens, None, None)
            compute.finish()
            return None, []
        prefix = self.reader.open(name_of(ask.prefix, total))
        assert prefix is not None
        if self.system.looks == "window":
            prefix.foresee(window(total, self._settings))
        elif self.system.looks == "nothing":
            prefix.foresee(torch.arange(total))
        choices = []
        for layer in range(self._layers):
            if self.system.looks in ("probe", "all heads"):
                compute.look(self._new_tokens, prefix.probe_keys(layer))
            choice = self._stores.weights.choice(self.system, ask, layer, self._settings, prefix)
            compute.layer(self._new_tokens, *prefix.read(layer, choice.tokens))
            choices.append(choice)
        compute.finish()
        return prefix, choices
