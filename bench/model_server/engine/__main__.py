"""Measures the caching documents' rows that need a model: SmolLM2 on one CPU thread, or random weights of a
larger shape on a GPU.

The rows are 000-7, 001-6, 001-7, 001-8, 003-5, and the times of single steps.
The sides take turns, and the tables have medians of the repeats. `--layers 4` takes the model's first four
layers, and its tables say so. All thirty layers take hours, and the comparison leaves out the same work on
both sides. `--shape 8b --device cuda` makes 8 billion random weights on the GPU. `--json FILE` keeps every
measurement, and adds to the measurements that a run of the same model left there. So several short runs make
one table. `make bench-engine` runs this where torch is installed; `ARGS="--rows 000-7"` runs one row.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench.model_server.engine import report_rows, rows, runs, serving_row, step_times
from bench.model_server.engine.shapes import SHAPES
from bench.tables import show, write_json
from model_server.runners.hf.errors import ModelError

ROWS = {
    "000-7": report_rows.identical_prompts,
    "001-6": rows.prompts_twice,
    "001-7": serving_row.serving,
    "001-8": rows.unique_prompts,
    "003-5": rows.prompt_modes,
    "step-times": step_times.step_times,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows to run (default: all)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="number of repeats; 0: only print the content of --json FILE (default %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="use only the first N layers of SmolLM2; 0: all thirty (default %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="number of prompts of 001-6 (default 20; 200 on a GPU) and of requests of 001-7 (24; 500) and 003-5 (64)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=runs.MODES, default=runs.MODES, help="modes of 003-5 to run"
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="use random weights of this shape instead of SmolLM2"
    )
    parser.add_argument("--device", default="cpu", help="device for --shape (default %(default)s)")
    parser.add_argument("--json", type=Path, help="add every figure to this file")
    parser.add_argument(
        "--up-to",
        type=int,
        metavar="N",
        help="stop when the file has N repeats of a row, those of earlier runs included",
    )
    args = parser.parse_args()
    if args.device != "cpu" and not args.shape:
        parser.error("--device is for --shape: SmolLM2's figures are those of a CPU")
    try:
        bench = (
            runs.prepare_shape(args.shape, device_name=args.device, num_blocks=8192)
            if args.shape
            else runs.prepare(layers=args.layers, num_blocks=5120)
        )
    except ModelError as error:
        parser.error(str(error))
    bench = replace(bench, modes=args.modes)
    if args.requests is not None:
        bench = replace(bench, requests=args.requests, name=f"{bench.name}, {args.requests} requests")
    kept = _kept(args.json, model=bench.name)
    for _ in range(args.repeats):
        for name in args.rows:
            if args.up_to is not None and kept.repeats.get(name, 0) >= args.up_to:
                continue
            ROWS[name](bench, kept, repeats=1, say=_say)
            kept.repeats[name] = kept.repeats.get(name, 0) + 1
            # The file is written after each repeat, so a run that is cut off loses one repeat of one row.
            write_json(args.json, _content(bench, kept))
    results = [ROWS[name](bench, kept, repeats=0, say=_say) for name in args.rows]
    for figures in results:
        _show(figures, model=bench.name)
    write_json(args.json, {**_content(bench, kept), "rows": results})


def _content(bench: runs.Bench, kept: runs.Kept) -> dict[str, object]:
    return {"model": bench.name, "repeats": kept.repeats, "series": kept.series}


def _show(figures: runs.Figures, *, model: str) -> None:
    cells = figures["rows"]
    columns = list(dict.fromkeys(key for row in cells for key in row))
    show(
        f"**{figures['row']}** ({model}), goal: {figures['goal']}",
        columns,
        [[row.get(key, "") for key in columns] for row in cells],
    )
    if "same greedy text in all modes" in figures:
        print(f"\nSame greedy text in all modes: {figures['same greedy text in all modes']}")


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _kept(path: Path | None, *, model: str) -> runs.Kept:
    """Return the content of the file. It is empty if there is no file."""
    if path is None or not path.exists():
        return runs.Kept({})
    content = json.loads(path.read_text())
    if content["model"] != model:
        sys.exit(f"{path} holds figures of {content['model']}, not of {model}: take another file")
    return runs.Kept(content["series"], content.get("repeats", {}))


if __name__ == "__main__":
    main()
