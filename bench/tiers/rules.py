"""Compares rules for which chunks the fast tiers should keep: bytes from disk by rule, with the tokens that
SmolLM2 attends to (rows 002-4 and 002-6).

Each rule serves the same requests, once with the document's choice of tokens and once with few chunks:
`python -m tests.engine_env run bench.tiers.rules`. Records have one number for each head and bytes are
multiplied, as with `--disk counted`. This takes some minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from bench.model_server.tables import show
from bench.tiers.disks import SwitchedDisk
from bench.tiers.patterns import Patterns, Recipe, patterns
from bench.tiers.shapes import SHAPES, NoCompute
from bench.tiers.systems import FEW_CHUNKS, PACKED, Served, Stores, System, Traffic, Weights
from model_server.runners.hf import model as hf
from model_server.tiers.placement import Score, by_importance, by_uses, by_uses_and_importance

RULES: dict[str, Score] = {
    "LFU of all uses": by_uses,
    "important tokens x uses": by_importance,
    "uses, then importance": by_uses_and_importance,
}
CHOICES = {"document's": PACKED, "few chunks": FEW_CHUNKS}
_LAYERS, _NEW_TOKENS, _WARM_UP = 12, 24, 24
_HISTORY_SEED = 6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--prefix-tokens", type=int, nargs="+", default=[256, 512], help="lengths of the prefixes"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.25, 0.5],
        help="shares of a prefix's tokens that are kept",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[8, 18, 28], help="seeds of the requests")
    parser.add_argument(
        "--requests", type=int, default=40, help="number of requests for each seed (default %(default)s)"
    )
    args = parser.parse_args()
    hf.use_threads(1)
    lines = [line for tokens in args.prefix_tokens for line in _measured(tokens, args)]
    show(
        f"MB from disk for each request, means over {len(args.seeds)} seeds of {args.requests} requests",
        ("prefix", "kept", "tiers", "choice", *RULES),
        lines,
    )


def _measured(prefix_tokens: int, args: argparse.Namespace) -> Iterator[list[str]]:
    recorded = patterns(Recipe(kind="few-shot", prefix_tokens=prefix_tokens))
    weights, disk, shape = Weights(recorded, num_layers=_LAYERS), SwitchedDisk(), SHAPES["opt-30b"]
    with tempfile.TemporaryDirectory(prefix="rules-") as folder:
        kv = shape.kv(layers=_LAYERS, head_dim=1)
        stores = Stores(Path(folder), kv, weights, Traffic(recorded, seed=7), disk)
        for ratio in args.ratios:
            for tiers in ((0.05, 0.1), (0.1, 0.3)):
                for name, system in CHOICES.items():
                    served = partial(_served, stores, system, ratio, tiers)
                    read = [
                        fmean(
                            _mb(served(score), recorded=recorded, seed=seed, requests=args.requests)
                            for seed in args.seeds
                        )
                        for score in RULES.values()
                    ]
                    cell = (str(prefix_tokens), f"{ratio:.0%}", f"{tiers[0]:.0%} + {tiers[1]:.0%}", name)
                    yield [*cell, *(f"{mb * shape.head_dim:.1f}" for mb in read)]
        stores.close()


def _served(stores: Stores, system: System, ratio: float, tiers: tuple[float, float], score: Score) -> Served:
    total = stores.bytes_per_prefix * stores.weights.num_prefixes
    served = Served(
        replace(system, score=score),
        stores,
        ratio=ratio,
        capacities_bytes=[int(share * total) for share in tiers],
        new_tokens=_NEW_TOKENS,
        device=torch.device("cpu"),
    )
    served.teach(Traffic(stores.weights.patterns, seed=_HISTORY_SEED).taught_as_asked())
    return served


def _mb(served: Served, *, recorded: Patterns, seed: int, requests: int) -> float:
    traffic = Traffic(recorded, seed=seed)
    for ask in traffic.asked(_WARM_UP):
        served.ask(ask, NoCompute())
    served.warmed()
    for ask in traffic.asked(requests):
        served.ask(ask, NoCompute())
    served.close()
    return fmean(served.measured.bytes_read) / 1e6


if __name__ == "__main__":
    main()
