"""Rows 002-5 and 002-6: time to the first token with a prefix on disk, on a rate-limited disk, and what was read for it.

SmolLM2's real computation; reads are real, and then held back to a rate (`RateLimitedDisk`): the times are those of such a disk,
not of this machine's. Every system runs in the same harness over its own copy of the same prefixes. Requests choose a prefix
by a Zipf law and go on with tokens of their own. Systems take turns request by request, so that other load hits all alike.
`python -m tests.engine_env run tests.bench.tiers.bench_ttft`
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from model_server.core.hashing import BlockHash, PrefixScope, make_hasher
from model_server.runners.hf import model as hf
from model_server.text.pretrained import PretrainedLanguage
from model_server.tiers.disk import RateLimitedDisk
from model_server.tiers.placement import Score, by_importance, by_uses
from model_server.tiers.reader import TieredReader
from model_server.tiers.records import Records
from model_server.tiers.selection import Choice, Chooser, Seen, head_weights, num_probe_kv_heads, probe
from model_server.tiers.settings import SelectionSettings
from model_server.tiers.store import PrefixStore
from model_server.tiers.view import SelectiveView
from model_server.weights.known import SMOLLM2, find
from tests.bench.model_server.tables import bars, show, write_json
from tests.bench.tiers.samples import Sequencer, documents

_BLOCK, _SINKS = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve a stored prefix."""

    name: str
    identify: str
    """`probe` (three heads), `all heads`, `window`, `nothing` (all is loaded), `recompute`."""
    reorder: bool = False
    score: Score = by_uses


EVERYTHING = System(name="load everything + LFU", identify="nothing")
RECOMPUTE = System(name="recompute", identify="recompute")
TOP_K = System(name="top-k of all heads + LFU", identify="all heads")
WINDOW = System(name="sinks + window + LFU", identify="window")
PROBED = System(name="+ probe", identify="probe")
PACKED = System(name="+ reordering", identify="probe", reorder=True)
OURS = System(name="+ importance caching", identify="probe", reorder=True, score=by_importance)
BASELINES = (RECOMPUTE, EVERYTHING, TOP_K, WINDOW)
SYSTEMS = (*BASELINES, PROBED, PACKED, OURS)


@dataclass(slots=True)
class Measured:
    ttft_s: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            "ttft_s": median(self.ttft_s),
            "bytes": sum(self.bytes_read) / len(self.bytes_read),
            "reads": sum(self.reads) / len(self.reads),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    prefix_tokens: int
    ratio: float
    chunk_tokens: int
    tier_share: float
    """What each of the two fast tiers holds, as a share of all prefixes' KV."""


def choose_window(seen: Seen, *, settings: SelectionSettings) -> Choice:
    return Choice(window(seen.num_prefix_tokens, settings))


def window(total: int, settings: SelectionSettings) -> torch.Tensor:
    kept = settings.kept(total)
    first = min(_SINKS, kept)
    return torch.tensor([*range(first), *range(total - kept + first, total)])


def choose_by_all_heads(seen: Seen, *, settings: SelectionSettings, num_heads: int, group: int) -> Choice:
    weights = head_weights(seen, num_heads=num_heads, group=group).mean(0)
    kept = settings.kept(seen.num_prefix_tokens)
    return Choice(weights.topk(kept).indices.sort().values, weights)


def choose_all(_: Seen) -> Choice:
    return Choice(None)


class Served:
    """One system with its store and tiers, over a model that all systems share."""

    def __init__(
        self,
        system: System,
        sequencer: Sequencer,
        cell: Cell,
        folder: Path,
        disk: RateLimitedDisk,
        *,
        total_bytes: int,
    ) -> None:
        self.system, self.measured, self._sequencer, self._disk = system, Measured(), sequencer, disk
        self._reordered = False
        config, shape = sequencer.model.module.config, sequencer.model.memory.shape
        heads, kv_heads = config.num_attention_heads, shape.num_kv_heads
        settings = SelectionSettings(ratio=cell.ratio)
        # Probed keys are what a choice looks at: all of them for all heads, none where nothing is looked at.
        probed = {
            "probe": num_probe_kv_heads(settings, num_heads=heads, num_kv_heads=kv_heads),
            "all heads": kv_heads,
        }
        choosers: dict[str, Chooser] = {
            "probe": partial(probe, settings=settings, group=heads // kv_heads),
            "all heads": partial(
                choose_by_all_heads, settings=settings, num_heads=heads, group=heads // kv_heads
            ),
            "window": partial(choose_window, settings=settings),
        }
        self._foreseen = torch.arange(cell.prefix_tokens)
        if system.identify == "window":
            self._foreseen = window(cell.prefix_tokens, settings)
        self._choose = choosers.get(system.identify, choose_all)
        self.records = Records(shape=shape, probe_kv_heads=probed.get(system.identify, 0))
        layout = self.records.layout("smollm2", block_tokens=_BLOCK, chunk_tokens=cell.chunk_tokens)
        self.store = PrefixStore(folder, layout, capacity_bytes=10 * total_bytes, disk=disk)
        capacity = int(cell.tier_share * total_bytes)
        self.reader = TieredReader(
            self.store, self.records, settings, capacities_bytes=(capacity, capacity), score=system.score
        )

    def put(self, prefix: list[int]) -> None:
        blocks = self._sequencer.blocks[: len(prefix) // _BLOCK]
        self.store.put(chain(prefix), self.records.of_memory(self._sequencer.model.memory, blocks))

    def ask(self, prefix: list[int], suffix: list[int]) -> None:
        """One request, timed to its first token's logits."""
        read, reads = self._disk.counts.bytes, self._disk.counts.reads
        started = time.monotonic()
        found = None if self.system.identify == "recompute" else self.reader.open(chain(prefix))
        view = SelectiveView(found, self._choose) if found else None
        if found and self.system.identify in ("nothing", "window"):
            found.foresee(self._foreseen)
        start = len(prefix) if found else 0
        self._sequencer.compute(prefix + suffix, start=start, view=view, num_logits=1)
        self.measured.ttft_s.append(time.monotonic() - started)
        self.measured.bytes_read.append(self._disk.counts.bytes - read)
        self.measured.reads.append(self._disk.counts.reads - reads)
        if found and view:
            self.reader.finish(found, view.choices.items())

    def warmed(self) -> None:
        """What was learned in the warm-up counts; what it took does not."""
        if self.system.reorder and not self._reordered:
            self.reader.reorder()
        self._reordered = True
        self.measured = Measured()

    def close(self) -> None:
        self.reader.check_integrity()
        self.store.check_integrity()
        self.reader.close()
        self.store.close()


def chain(token_ids: Sequence[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    hasher = make_hasher("sha256_cbor", block_size_tokens=_BLOCK)
    hasher.extend(hashes, token_ids, num_blocks=len(token_ids) // _BLOCK, scope=PrefixScope())
    return hashes


def measure(
    module: Any, texts: Sequence[list[int]], cell: Cell, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All systems in one cell. `texts`: a prefix's tokens, then those that its requests go on with."""
    sequencer = Sequencer(module, max_tokens=cell.prefix_tokens + args.new_tokens)
    total_bytes = sequencer.model.memory.shape.bytes_per_token * cell.prefix_tokens * len(texts)
    rng = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
        served = [
            Served(
                system,
                sequencer,
                cell,
                Path(folder) / str(number),
                RateLimitedDisk(bytes_per_s=args.disk_mb_per_s * 1e6, per_read_s=args.read_us * 1e-6),
                total_bytes=total_bytes,
            )
            for number, system in enumerate(SYSTEMS)
        ]
        for text in texts:
            prefix = text[: cell.prefix_tokens]
            sequencer.compute(prefix, start=0, num_logits=1)
            for each in served:
                each.put(prefix)
        warm_up = list(_requests(texts, cell, args.new_tokens, rng, count=args.warm_up))
        for each in served:
            for _ in range(2):  # reordered chunks are others: they have to be found again
                for prefix, suffix in warm_up:
                    if each.system.identify != "recompute":
                        each.ask(prefix, suffix)
                each.warmed()
        for prefix, suffix in _requests(texts, cell, args.new_tokens, rng, count=args.requests):
            for each in rng.sample(served, len(served)):
                each.ask(prefix, suffix)
        for each in served:
            each.close()
    return [
        {**asdict(cell), "system": each.system.name, **each.measured.row(), "all": asdict(each.measured)}
        for each in served
    ]


def _requests(
    texts: Sequence[list[int]], cell: Cell, new_tokens: int, rng: random.Random, *, count: int
) -> Iterator[tuple[list[int], list[int]]]:
    for _ in range(count):
        [text] = rng.choices(texts, [1 / (rank + 1) for rank in range(len(texts))])
        start = rng.randrange(cell.prefix_tokens, len(text) - new_tokens + 1)
        yield text[: cell.prefix_tokens], text[start : start + new_tokens]


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    columns = ("prefix", "kept", "each tier", "system", "TTFT s (median)", "MB read", "reads", "against ours")
    ours = {_cell(row): row["ttft_s"] for row in rows if row["system"] == OURS.name}
    show(
        f"002-5: rate-limited disk, {args.disk_mb_per_s:g} MB/s and {args.read_us:g} us a read; {args.requests} requests a cell",
        columns,
        [
            (
                *_cell(row),
                row["system"],
                row["ttft_s"],
                row["bytes"] / 1e6,
                round(row["reads"]),
                f"{row['ttft_s'] / ours[_cell(row)]:.2f}x",
            )
            for row in rows
        ],
    )
    steps = (TOP_K, PROBED, PACKED, OURS)
    table = []
    for cell in ours:
        times = {row["system"]: row for row in rows if _cell(row) == cell}
        for before, after in pairwise(steps):
            one, other = times[before.name], times[after.name]
            table.append(
                (
                    *cell,
                    after.name,
                    one["ttft_s"] - other["ttft_s"],
                    (one["bytes"] - other["bytes"]) / 1e6,
                    round(one["reads"] - other["reads"]),
                )
            )
    show(
        "002-6: what each technique saves, one after the other, from top-k + LFU on",
        ("prefix", "kept", "each tier", "technique", "s", "MB", "reads"),
        table,
    )
    longest = max(row["ttft_s"] for row in rows)
    for cell in ours:
        bars(
            f"TTFT in seconds, prefix {cell[0]}, {cell[1]} kept, tiers {cell[2]}",
            [(row["system"][:24].rjust(24), row["ttft_s"]) for row in rows if _cell(row) == cell],
            full=longest,
        )


def _cell(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["prefix_tokens"], f"{row['ratio']:.0%}", f"{row['tier_share']:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--tier-shares", type=float, nargs="+", default=[0.05, 0.2])
    parser.add_argument("--chunk-tokens", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--disk-mb-per-s", type=float, default=4.0)
    parser.add_argument("--read-us", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hf.use_threads(1)
    folder = find(SMOLLM2, progress=print)
    module = hf.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    longest = max(args.prefix_tokens) + 8 * args.new_tokens
    texts = documents(PretrainedLanguage(folder), length_tokens=longest, count=args.prefixes)
    rows: list[dict[str, Any]] = []
    for prefix_tokens in args.prefix_tokens:
        for ratio in args.ratios:
            for share in args.tier_shares:
                cell = Cell(
                    prefix_tokens=prefix_tokens, ratio=ratio, chunk_tokens=args.chunk_tokens, tier_share=share
                )
                rows += measure(
                    module, [text[: prefix_tokens + 8 * args.new_tokens] for text in texts], cell, args
                )
                print(f"measured {cell}", flush=True)
                write_json(args.json, rows)
    report(rows, args)


if __name__ == "__main__":
    main()
