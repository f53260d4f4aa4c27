"""Measures rows 002-3, 002-5 and 002-6: reads, bytes and time to the first token for prefixes on disk, on
OPT's shapes.

`make bench-tiers`. `systems.py` and `shapes.py` say which parts are real and which are given; docs/tiers.md
has the tables. The systems take turns at each request, so that other load affects all of them alike.

--disk direct    read this machine's disk with O_DIRECT, past this system's page cache
       limited   read through the page cache at a limited rate, in slow motion: disk and accelerator are
                 slower by the same factor, so that this machine's own overhead weighs little
       counted   measure no time: records have one number for each head instead of 128, and bytes are
                 multiplied
--device cpu     a computation takes at least the time that a stated accelerator would need
         cuda    the computation is real, with random weights of the shape; the first tier is the GPU's memory
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.tiers import report
from bench.tiers.cells import pooled, write_cells
from bench.tiers.disks import DirectDisk, SwitchedDisk
from bench.tiers.patterns import Patterns, Recipe, patterns
from bench.tiers.shapes import SHAPES, Compute, ImposedCompute, NoCompute, RealCompute, Shape
from bench.tiers.systems import COUNTED, RECOMPUTE, SYSTEMS, Served, Stores, Traffic, Weights
from model_server.runners.hf import model as hf
from model_server.tiers.disk import Disk, RateLimitedDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shape: str
    layers: int
    prompts: str
    disk: str
    prefix_tokens: int
    ratio: float
    gpu_share: float
    cpu_share: float
    """The sizes of the fast tiers, as shares of all prefixes' KV."""


def main() -> None:
    args = parser().parse_args()
    rows: list[dict[str, Any]] = []
    if args.merge:
        rows = pooled([row for path in args.merge for row in json.loads(path.read_text())])
    else:
        for name in args.shape:
            for prefix_tokens in args.prefix_tokens:
                recipe = Recipe(
                    kind=args.prompts,
                    prefix_tokens=prefix_tokens,
                    prefixes=args.prefixes,
                    requests=args.recorded,
                    new_tokens=args.new_tokens,
                )
                for found in measured(SHAPES[name], patterns(recipe), args):
                    rows += found
                    report.write_json(args.json, rows)
    report.write_json(args.json, rows)
    report.print_tables(rows)
    if args.cells:
        write_cells(args.cells, rows, new_tokens=args.new_tokens)
    if args.svg:
        args.svg.write_text(report.svg(rows))


def measured(shape: Shape, recorded: Patterns, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the results cell by cell. All cells of one shape and prefix length read the same stores."""
    device = torch.device(args.device)
    counted = args.disk == "counted"
    layers = args.layers or (
        shape.layers if device.type == "cuda" else min(12 if counted else 6, shape.layers)
    )
    hf.use_threads(1)
    weights, switched, compute = Weights(recorded, num_layers=layers), SwitchedDisk(), compute_of(shape, args)
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=args.folder) as folder:
        started = time.monotonic()
        kv = shape.kv(layers=layers, head_dim=1 if counted else None)
        stores = Stores(Path(folder), kv, weights, Traffic(recorded, seed=7), switched)
        _say(f"{shape.name}, {weights.num_tokens} tokens: stored, {time.monotonic() - started:.0f} s")
        for ratio in args.ratios:
            for gpu_share, cpu_share in args.tiers:
                cell = Cell(
                    shape=shape.name,
                    layers=layers,
                    prompts=args.prompts,
                    disk=_disk_name(args),
                    prefix_tokens=weights.num_tokens,
                    ratio=ratio,
                    gpu_share=gpu_share,
                    cpu_share=cpu_share,
                )
                served = _ask_all(cell, stores, compute, recorded, args)
                _say(f"measured {cell}, {time.monotonic() - started:.0f} s")
                factor = shape.head_dim if counted else 1
                yield [_row(cell, each, factor=factor, timed=not counted) for each in served]
        stores.close()


def _ask_all(
    cell: Cell, stores: Stores, compute: Compute, recorded: Patterns, args: argparse.Namespace
) -> list[Served]:
    traffic, device = Traffic(recorded, seed=8), torch.device(args.device)
    total = stores.bytes_per_prefix * stores.weights.num_prefixes
    served = [
        Served(
            system,
            stores,
            ratio=cell.ratio,
            capacities_bytes=(int(cell.gpu_share * total), int(cell.cpu_share * total)),
            new_tokens=args.new_tokens,
            device=device,
        )
        for system in (COUNTED if args.disk == "counted" else SYSTEMS)
    ]
    # Warm-up fills the tiers. The source of its bytes does not matter, and warm-up does not wait for an
    # imposed accelerator.
    stores.disk.now = Disk()
    without_waiting = NoCompute() if isinstance(compute, ImposedCompute) else compute
    warm_up = list(traffic.asked(args.warm_up))
    # These requests are drawn separately, so that every version of the history leads to the same requests.
    history = Traffic(recorded, seed=6).taught_as_asked()
    for each in served:
        each.teach(history)
        for ask in warm_up if each.system is not RECOMPUTE else []:
            each.ask(ask, without_waiting)
        each.warmed()
    stores.disk.now = disk_of(args)
    rng = random.Random(9)
    for ask in traffic.asked(args.requests):
        for each in rng.sample(served, len(served)):
            each.ask(ask, compute)
    for each in served:
        each.close()
    return served


def _row(cell: Cell, served: Served, *, factor: int, timed: bool) -> dict[str, Any]:
    measured = served.measured
    count = len(measured.bytes_read)
    return {
        **asdict(cell),
        "system": served.system.name,
        "requests": count,
        "ttft_s": median(measured.ttft_s) if timed else None,
        "ttft_mean_s": sum(measured.ttft_s) / count if timed else None,
        "bytes": factor * sum(measured.bytes_read) / count,
        "reads": sum(measured.reads) / count,
        "wanted_chunks": sum(measured.wanted) / count,
        "chosen_tokens": sum(measured.chosen_tokens) / count,
        "all_ttft_s": measured.ttft_s if timed else [],
        "all_bytes": [factor * number for number in measured.bytes_read],
    }


def disk_of(args: argparse.Namespace) -> Disk:
    if args.disk == "limited":
        return RateLimitedDisk(
            bytes_per_s=args.disk_gb_per_s * 1e9 / args.slow_motion, per_read_s=args.read_us * 1e-6
        )
    return DirectDisk() if args.disk == "direct" else Disk()


def _disk_name(args: argparse.Namespace) -> str:
    if args.disk != "limited":
        return str(args.disk)
    return f"limited, {args.disk_gb_per_s:g} GB/s, {args.slow_motion:g} times slower"


def compute_of(shape: Shape, args: argparse.Namespace) -> Compute:
    device = torch.device(args.device)
    if args.disk == "counted":
        return NoCompute()
    if device.type == "cuda" or args.real_compute:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        return RealCompute(shape, device=device, dtype=dtype)
    slower = args.slow_motion if args.disk == "limited" else 1.0
    return ImposedCompute(
        shape,
        flops_per_s=args.tflops * 1e12 / slower,
        weights_bytes_per_s=args.weights_gb_per_s * 1e9 / slower,
    )


def _shares(text: str) -> tuple[float, float]:
    gpu, cpu = text.split("+")
    return float(gpu) / 100, float(cpu) / 100


def _say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_model(parser)
    _add_storage(parser)
    _add_requests(parser)
    _add_results(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the model and its accelerator").add_argument
    add("--shape", nargs="+", choices=sorted(SHAPES), default=["opt-30b"], help="sizes of the models")
    add(
        "--layers",
        type=int,
        default=0,
        help="number of the shape's layers (default: all on a GPU, otherwise 6; 12 for --disk counted)",
    )
    add("--device", default="cpu", help="device of the computation (default %(default)s)")
    add("--real-compute", action="store_true", help="do real multiplications on the CPU too")
    add(
        "--tflops",
        type=float,
        default=150.0,
        help="speed of the accelerator that is imposed on the CPU (default %(default)s)",
    )
    add(
        "--weights-gb-per-s",
        type=float,
        default=1500.0,
        help="memory rate of the accelerator that is imposed on the CPU (default %(default)s)",
    )


def _add_storage(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the disk and the fast tiers").add_argument
    add(
        "--disk",
        choices=("direct", "limited", "counted"),
        default="direct",
        help="kind of disk, as above (default %(default)s)",
    )
    add("--disk-gb-per-s", type=float, default=5.0, help="rate of the limited disk (default %(default)s)")
    add(
        "--slow-motion",
        type=float,
        default=100.0,
        help="factor by which the limited disk and its accelerator are slower (default %(default)s)",
    )
    add(
        "--read-us",
        type=float,
        default=100.0,
        help="extra microseconds of each read of the limited disk (default %(default)s)",
    )
    add(
        "--tiers",
        type=_shares,
        nargs="+",
        default=[(0.01, 0.02), (0.05, 0.1), (0.1, 0.3)],
        metavar="GPU+CPU",
        help="sizes of the fast tiers, in percent of all prefixes' KV (default 1+2 5+10 10+30)",
    )
    add("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the requests").add_argument
    add(
        "--prompts",
        choices=("few-shot", "passages"),
        default="few-shot",
        help="kind of prompts, as `patterns.py` describes them (default %(default)s)",
    )
    add("--prefixes", type=int, default=6, help="number of prefixes (default %(default)s)")
    add(
        "--recorded",
        type=int,
        default=24,
        help="number of requests of each prefix whose weights are recorded (default %(default)s)",
    )
    add("--prefix-tokens", type=int, nargs="+", default=[256, 512], help="lengths of the prefixes")
    add(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.25, 0.5],
        help="shares of a prefix's tokens that are kept",
    )
    add(
        "--new-tokens",
        type=int,
        default=24,
        help="number of tokens that a request adds to its prefix (default %(default)s)",
    )
    add(
        "--warm-up",
        type=int,
        default=24,
        help="number of requests before those measured (default %(default)s)",
    )
    add("--requests", type=int, default=20, help="number of measured requests (default %(default)s)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the results").add_argument
    add("--json", type=Path, help="file for the figures")
    add("--svg", type=Path, help="file for a picture of the times")
    add(
        "--merge",
        type=Path,
        nargs="+",
        help="show the results of earlier runs, with runs of the same cells combined, and measure nothing",
    )
    add("--cells", type=Path, help="file for the cells against which the cost model is tested")


if __name__ == "__main__":
    main()
