"""Compares our engine, transformers' continuous batching and vLLM on the same CPU, model and requests, with
their caches and without.

All use SmolLM2 in float32, one thread, greedy decoding and blocks of 32 tokens. The sides take turns. Times
are CPU seconds of each engine's process. `--layers 4` takes the model's first four layers, in all engines.
`--json FILE` keeps every turn, and adds to the turns that a run with the same layers left there. So several
short runs make one table. Rows 001-7 (at a rate that both engines can sustain, and at one above) and 001-8
are serving loads: requests come at moments of each engine's own CPU clock. `make bench-peers` runs the bench
where torch and vLLM are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.model_server.peers import figures, work
from bench.model_server.peers.figures import Recorded
from bench.model_server.peers.first_layers import first_layers
from bench.model_server.peers.sides import Side, SideName
from bench.model_server.peers.work import ENGINES
from bench.model_server.tables import show, write_json
from model_server.text.pretrained import PretrainedLanguage
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env.prompts import prose

Content = dict[str, Any]


def main() -> None:
    args = _arguments()
    content = _begin(args.json, layers=args.layers)
    if args.repeats:
        with tempfile.TemporaryDirectory() as folder:
            _measure(args, content, folder=Path(folder))
        write_json(args.json, content)
    print_tables(content)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(work.ROWS),
        default=[row for row in work.ROWS if row not in work.TIMED],
        help="rows to run (default: all rows without arrivals at random times)",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES[1:],
        default=ENGINES[1:],
        help="engines besides ours (default: both)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of repeats; 0: only print the content of --json FILE"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="use only the first N layers of the model; 0: all thirty"
    )
    parser.add_argument("--json", type=Path, help="add every turn to this file")
    return parser.parse_args()


def _begin(path: Path | None, *, layers: int) -> Content:
    if path is None or not path.exists():
        return {"layers": layers, "versions": {}, "rows": {}}
    content: Content = json.loads(path.read_text())
    if content["layers"] != layers:
        sys.exit(
            f"{path} holds turns with --layers {content['layers']}: use another file, or this number of layers"
        )
    return content


def _measure(args: argparse.Namespace, content: Content, *, folder: Path) -> None:
    model = find(SMOLLM2, progress=_say)
    if args.layers:
        model = first_layers(model, count=args.layers, into=folder / "model")
    language = PretrainedLanguage(model)

    def text_of(name: str, tokens: int) -> list[int]:
        return [int(token) for token in language.encode(prose(name, words=tokens))[:tokens]]

    most = max(work.num_blocks(work.ROWS[name](text_of, 0)) for name in args.rows)
    with contextlib.ExitStack() as running:
        engines = [
            engine
            for engine in ENGINES
            if engine in ("ours", *args.engines)
            and (engine != "transformers" or not all(row in work.TIMED for row in args.rows))
        ]
        names = [SideName(engine, cache) for engine in engines for cache in (True, False)]
        # Start all processes before waiting for the first one.
        started = [Side(name, model=model, num_blocks=most, logs=folder) for name in names]
        sides = [running.enter_context(side) for side in started]
        content["versions"] = {side.name.engine: side.version for side in sides}
        _repeat(sides, work.warm_up(text_of), say="warm-up")
        for row in args.rows:
            for _ in range(args.repeats):
                known = content["rows"].get(row)
                kept = Recorded.read(known) if known else Recorded.of(work.ROWS[row](text_of, 0))
                number = len(kept.repeats)
                able = [side for side in sides if row not in work.TIMED or side.name.engine != "transformers"]
                turns = _repeat(
                    able[:: -1 if number % 2 else 1],
                    work.ROWS[row](text_of, number),
                    say=f"{row}, repeat {number}",
                )
                kept.repeats.append(turns)
                content["rows"][row] = asdict(kept)
                write_json(args.json, content)


def _repeat(sides: Sequence[Side], rounds: Sequence[work.Round], *, say: str) -> dict[str, work.Turn]:
    turns = {}
    for side in sides:
        turns[str(side.name)] = turn = side.turn(rounds)
        _say(f"{say}: {side.name}: {sum(turn.round_cpu_s):.2f} CPU s of {sum(turn.round_wall_s):.2f} s")
    return turns


def print_tables(content: Content) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    print(f"\n{content['layers'] or 30} layers; {versions}")
    for row, kept in content["rows"].items():
        recorded = Recorded.read(kept)
        if row in work.TIMED:
            lines = figures.served(recorded)
        else:
            # A later run may have used other engines than the first.
            engines = [e for e in ENGINES if all(f"{e} with" in one for one in recorded.repeats)]
            make = figures.first_tokens if row in work.FIRST_TOKENS else figures.whole_runs
            lines = make(recorded, engines)
        show(
            f"**{row}**, {len(recorded.repeats)} repeats",
            list(lines[0]),
            [list(line.values()) for line in lines],
        )


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
