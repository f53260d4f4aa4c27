"""Row 001-7 on real servers: Poisson arrivals, 320 shared and 533 own tokens, 150 answered, with the block cache and without.

The document's prompts are 330 and 550 tokens; ours are as much shorter as makes the shared part whole blocks of 32, so that the same
37.5 % can be found. One request that does not count comes first: the shared part is then cached, as it is for 499 of the document's
500 requests. `--shared-tokens 0` is row 001-8: nothing can be found.

`make bench-serving ARGS="--rates 0.1 0.15 --requests 60"`: our engine (`model-server serve --runner hf`) and vLLM on the CPU, the same SmolLM2
in float32, one thread each, one after the other on the same arrivals. `--layers 4` takes the model's first four layers. Times are the clock's:
nothing else should run. `--json FILE` keeps every run and adds to those that the file holds; `--repeats 0` tells what it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.model_server.peers.first_layers import first_layers
from bench.model_server.serving import client, servers
from bench.model_server.serving.client import Load
from bench.model_server.serving.servers import ServerPlan
from bench.model_server.tables import show, write_json
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.model_server.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--engines", nargs="+", choices=servers.ENGINES, default=list(servers.ENGINES))
    made.add_argument("--caches", nargs="+", choices=("on", "off"), default=["on", "off"])
    made.add_argument("--rates", type=float, nargs="+", default=[0.1], metavar="PER_S")
    made.add_argument("--repeats", type=int, default=1, help="each with arrivals and prompts of its own")
    made.add_argument(
        "--seed", type=int, default=0, help="of the first repeat; 0: one that the file does not hold"
    )
    made.add_argument("--layers", type=int, default=0, help="SmolLM2's first so many layers; 0: all thirty")
    made.add_argument("--model", type=Path, help="a model folder instead of SmolLM2")
    for name, default in (
        ("requests", 500),
        ("shared-tokens", 320),
        ("own-tokens", 533),
        ("answer-tokens", 150),
    ):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default %(default)s)")
    made.add_argument("--json", type=Path, help="keep every figure in this file, after those that it holds")
    return made


def main() -> None:
    args = parser().parse_args()
    runs: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        runs = json.loads(args.json.read_text())["runs"]
    first = args.seed or 1 + max((run["seed"] for run in runs), default=0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(args, Path(scratch)) if args.repeats else Path()
        for seed in range(first, first + args.repeats):
            for engine in args.engines:
                for cache in sorted((name == "on" for name in args.caches), reverse=seed % 2 == 1):
                    runs += _side(args, engine, folder, Path(scratch), cache=cache, seed=seed)
                    # Kept at once: a run that is cut off loses one side.
                    write_json(args.json, {"runs": runs})
    _tell(runs)


def _folder(args: argparse.Namespace, scratch: Path) -> Path:
    folder: Path = args.model or find(SMOLLM2, progress=_say)
    return first_layers(folder, count=args.layers, into=scratch / "model") if args.layers else folder


def _side(
    args: argparse.Namespace, engine: str, folder: Path, scratch: Path, *, cache: bool, seed: int
) -> list[dict[str, Any]]:
    """One server's start, and each rate."""
    longest = args.shared_tokens + args.own_tokens + args.answer_tokens
    plan = ServerPlan(
        folder=folder,
        cache=cache,
        num_blocks=min(64, args.requests) * -(-longest // BLOCK_TOKENS) + 64,
        max_len_tokens=longest + BLOCK_TOKENS,
    )
    found = []
    with servers.running(engine, plan, log=scratch / f"{engine}.log") as url:
        sizes = {"shared_tokens": args.shared_tokens, "own_tokens": args.own_tokens}
        for rate in args.rates:
            load = Load(
                requests=args.requests,
                answer_tokens=args.answer_tokens,
                rate_per_s=rate,
                seed=seed,
                **sizes,
            )
            run = asyncio.run(client.serve(url, MODEL_NAME, load, name=f"rate {rate}"))
            row = run.row()
            _say(
                f"{engine}, cache {'on' if cache else 'off'}, {rate}/s: TTFT {row['TTFT ms']:.0f} ms, hits {row['hits']:.3f}"
            )
            about = {
                "engine": engine,
                "cache": cache,
                "rate": rate,
                "seed": seed,
                "layers": args.layers or 30,
                "requests": args.requests,
                "shared": args.shared_tokens,
                "load": os.getloadavg()[0],
            }
            found.append({**about, "row": row})
    return found


def _tell(runs: list[dict[str, Any]]) -> None:
    sides: defaultdict[tuple[Any, ...], list[dict[str, float]]] = defaultdict(list)
    for run in runs:
        key = (run["engine"], run["layers"], run["requests"], run["shared"], run["rate"])
        sides[(*key, run["cache"])].append(run["row"])
    rows, names = [], list(runs[0]["row"]) if runs else []
    for side in sorted(sides, key=str):
        medians = [median(row[name] for row in sides[side]) for name in names]
        rows.append([*side[:-1], "on" if side[-1] else "off", *medians])
    show(
        "**001-7** on real servers",
        ("server", "layers", "requests", "shared tokens", "sent/s", "cache", *names),
        rows,
    )


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
