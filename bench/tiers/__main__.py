"""Measures rows 002-3, 002-5 and 002-6: reads, bytes and time to the first token for prefixes on disk, on
OPT's shapes.

`make bench-tiers`. `systems.py` says which parts are real and which are given. The systems take turns at each
request, so that other load affects all of them alike.

--disk counted   measure no time: records have one number for each head instead of 128, and bytes are
                 multiplied
       direct    read this machine's disk with O_DIRECT, past this system's page cache
--device cpu     a computation takes at least the time that a stated accelerator would need
         cuda    the computation is real, with random weights of the shape; the first tier is the GPU's memory
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from bench.tables import show, write_json
from bench.tiers.disks import DirectDisk, SwitchedDisk
from bench.tiers.patterns import NEW_TOKENS, Patterns, Recipe, carry, patterns
from bench.tiers.shapes import SHAPES, Compute, ImposedCompute, RealCompute, Shape
from bench.tiers.systems import COUNTED, RECOMPUTE, SYSTEMS, Served, Stores, Traffic, Weights
from model_server.runners.hf import model as hf
from model_server.tiers.files import Disk

FLOPS_PER_S, WEIGHTS_BYTES_PER_S = 150e12, 1500e9
"""The accelerator that is imposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    prefix_tokens: int
    ratio: float
    gpu_share: float
    cpu_share: float
    """The sizes of the fast tiers, as shares of all prefixes' KV."""


def main() -> None:
    args = parser().parse_args()
    rows: list[dict[str, Any]] = []
    for prefix_tokens in args.prefix_tokens:
        recipe = Recipe(prefix_tokens=prefix_tokens, prefixes=args.prefixes, requests=args.recorded)
        if args.carry:
            print(f"carry {carry(recipe)} to the machine that measures")
            continue
        recorded = patterns(recipe)
        for found in measured(SHAPES[args.shape], recorded, args):
            rows += found
            write_json(args.json, rows)
    print_tables(rows)


def measured(shape: Shape, recorded: Patterns, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the results cell by cell. All cells of one shape and prefix length read the same stores."""
    counted = args.disk == "counted"
    layers = shape.layers if args.device == "cuda" else min(12 if counted else 6, shape.layers)
    hf.use_threads(1)
    weights, switched, compute = Weights(recorded, num_layers=layers), SwitchedDisk(), compute_of(shape, args)
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=args.folder) as folder:
        kv = shape.kv(layers=layers, head_dim=1 if counted else None)
        stores = Stores(Path(folder), kv, weights, Traffic(recorded, seed=7), switched)
        for ratio in args.ratios:
            for gpu_share, cpu_share in args.tiers:
                cell = Cell(
                    prefix_tokens=weights.num_tokens, ratio=ratio, gpu_share=gpu_share, cpu_share=cpu_share
                )
                served = _ask_all(cell, stores, compute, args)
                print(f"measured {cell}", flush=True)
                yield [_row(cell, each, factor=shape.head_dim if counted else 1) for each in served]
        stores.close()


def _ask_all(cell: Cell, stores: Stores, compute: Compute, args: argparse.Namespace) -> list[Served]:
    recorded = stores.weights.patterns
    traffic, total = Traffic(recorded, seed=8), stores.bytes_per_prefix * stores.weights.num_prefixes
    served = [
        Served(
            system,
            stores,
            ratio=cell.ratio,
            capacities_bytes=(int(cell.gpu_share * total), int(cell.cpu_share * total)),
            new_tokens=NEW_TOKENS,
            device=torch.device(args.device),
        )
        for system in (COUNTED if args.disk == "counted" else SYSTEMS)
    ]
    # Warm-up fills the tiers. The source of its bytes does not matter, and warm-up does not wait for an
    # imposed accelerator.
    stores.disk.now = Disk()
    without_waiting = Compute() if isinstance(compute, ImposedCompute) else compute
    warm_up = list(traffic.asked(args.warm_up))
    # These requests are drawn separately, so that every version of the history leads to the same requests.
    history = Traffic(recorded, seed=6).taught_as_asked()
    for each in served:
        each.teach(history)
        for ask in warm_up if each.system is not RECOMPUTE else warm_up[:1]:
            each.ask(ask, without_waiting)
        each.warmed()
    stores.disk.now = DirectDisk() if args.disk == "direct" else Disk()
    rng = random.Random(9)
    for ask in traffic.asked(args.requests):
        for each in rng.sample(served, len(served)):
            each.ask(ask, compute)
    for each in served:
        each.close()
    return served


def _row(cell: Cell, served: Served, *, factor: int) -> dict[str, Any]:
    measured = served.measured
    count = len(measured.bytes_read)
    return {
        **asdict(cell),
        "system": served.system.name,
        "ttft_s": fmean(measured.ttft_s),
        "median_ttft_s": median(measured.ttft_s),
        "bytes": factor * sum(measured.bytes_read) / count,
        "reads": sum(measured.reads) / count,
        "wanted_chunks": sum(measured.wanted) / count,
        "chosen_tokens": sum(measured.chosen_tokens) / count,
    }


def compute_of(shape: Shape, args: argparse.Namespace) -> Compute:
    if args.disk == "counted":
        return Compute()
    if args.device == "cuda" or args.real_compute:
        dtype = torch.float16 if args.device == "cuda" else torch.float32
        return RealCompute(shape, device=torch.device(args.device), dtype=dtype)
    return ImposedCompute(shape, flops_per_s=FLOPS_PER_S, weights_bytes_per_s=WEIGHTS_BYTES_PER_S)


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print a line for each cell and a column for each system. What a technique saves (002-6) is the
    difference of two columns.
    """
    cells: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        tiers = f"{row['gpu_share']:.0%} + {row['cpu_share']:.0%}"
        cells.setdefault((str(row["prefix_tokens"]), f"{row['ratio']:.0%}", tiers), {})[row["system"]] = row
    names = list(dict.fromkeys(row["system"] for row in rows))
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "002-5, 002-6: MB from disk (reads) a request": lambda row: (
            f"{row['bytes'] / 1e6:.1f} ({row['reads']:.0f})"
        ),
        "002-3: chunks that a request needs, from disk and from the fast tiers": lambda row: (
            f"{row['wanted_chunks']:.0f}"
        ),
    }
    if RECOMPUTE.name in names:
        figures["002-5: mean time to the first token, median, s"] = lambda row: (
            f"{row['ttft_s']:.3f}, {row['median_ttft_s']:.3f}"
        )
    for title, text in figures.items():
        lines = [(*cell, *(text(found[name]) for name in names)) for cell, found in cells.items()]
        show(title, ("prefix", "kept", "tiers", *names), lines)


def _shares(text: str) -> tuple[float, float]:
    gpu, cpu = text.split("+")
    return float(gpu) / 100, float(cpu) / 100


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="opt-30b", help="sizes of the model")
    add("--device", default="cpu", help="device of the computation")
    add("--real-compute", action="store_true", help="do real multiplications on the CPU too")
    add("--disk", choices=("counted", "direct"), default="counted", help="kind of disk, as above")
    add("--prefix-tokens", type=int, nargs="+", default=[256, 512], help="lengths of the prefixes")
    add("--ratios", type=float, nargs="+", default=[0.25, 0.5], help="shares of a prefix that are kept")
    add(
        "--tiers",
        type=_shares,
        nargs="+",
        default=[(0.01, 0.02), (0.05, 0.1), (0.1, 0.3)],
        metavar="GPU+CPU",
        help="sizes of the fast tiers, in percent of all prefixes' KV (default 1+2 5+10 10+30)",
    )
    add("--prefixes", type=int, default=6, help="number of prefixes")
    add("--recorded", type=int, default=24, help="number of requests of each prefix that are recorded")
    add("--warm-up", type=int, default=24, help="number of requests before those measured")
    add("--requests", type=int, default=20, help="number of measured requests")
    add("--carry", action="store_true", help="only record the patterns, into build/tiers-patterns")
    add("--folder", type=Path, help="folder of the stores (default: the temporary folder)")
    add("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    main()
