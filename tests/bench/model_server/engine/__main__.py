"""The caching documents' rows that need a real model: SmolLM2 on one CPU thread.

Rows 000-7, 001-6, 001-8 and 003-5; CPU seconds, sides in turns, medians of the repeats. `--layers 4` takes the model's first
four layers (its tables say so): all thirty take hours, and what is compared is the same work left out. `make bench-engine` runs
this where torch is; `ARGS="--rows 000-7"` one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.model_server.engine import rows, runs
from tests.bench.model_server.tables import show, write_json

ROWS = {
    "000-7": rows.identical_prompts,
    "001-6": rows.prompts_twice,
    "001-8": rows.unique_prompts,
    "003-5": rows.prompt_modes,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.model_server.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--layers", type=int, default=4, help="the model's first so many layers; 0: all thirty"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    told = []
    bench = runs.prepare(layers=args.layers, num_blocks=4096)
    for name in args.rows:
        figures = ROWS[name](
            bench, repeats=args.repeats, say=lambda line: print(f"  {line}", file=sys.stderr, flush=True)
        )
        figures["layers"] = bench.layers
        told.append(figures)
        head = f"**{name}** ({bench.layers} layers), goal: {figures['goal']}"
        cells = figures["rows"]
        columns = list(dict.fromkeys(key for row in cells for key in row))
        show(head, columns, [[row.get(key, "") for key in columns] for row in cells])
        if "same greedy text in all modes" in figures:
            print(f"\nSame greedy text in all modes: {figures['same greedy text in all modes']}")
    write_json(args.json, told)


if __name__ == "__main__":
    main()
