"""Measures row 001-7 on real servers: Poisson arrivals, 320 shared and 533 own tokens, 150 answered, with the
block cache and without.

The document's prompts have 330 and 550 tokens. Ours are a little shorter, so that the shared part has whole
blocks of 32 and the same 37.5 % can be found. A first request is not counted: after it the shared part is
cached, as for 499 of the document's 500 requests. `--shared-tokens 0` measures row 001-8: nothing can be
found.

`make bench-serving ARGS="--rates 0.1 0.15 --requests 60"`: runs our engine (`model-server serve --runner hf`)
and vLLM on the CPU, with the same SmolLM2 in float32 and one thread each, one after the other on the same
arrivals. `--layers 4` takes the model's first four layers. Times are wall time, so no other program should
run. `--clock cpu` counts the CPU seconds of the server's processes instead and skips idle time, so the
machine may also do other work. A CPU second still computes less beside other programs. With `--at-once` the
servers with the cache and without answer the same requests at the same time, so other programs slow both
alike. `--json FILE` adds every run to the file, so a bench that was cut off continues with the missing runs.
`--repeats 0` prints the content of the file: means, medians and extremes of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.model_server.peers.first_layers import first_layers
from bench.model_server.serving import client, figures, servers, turns
from bench.model_server.serving.client import Load
from bench.model_server.serving.clocks import CpuClock, WallClock
from bench.model_server.serving.servers import RunningServer, ServerPlan
from bench.model_server.tables import show, write_json
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.model_server.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--engines",
        nargs="+",
        choices=servers.ENGINES,
        default=list(servers.ENGINES),
        help="engines to run (default: all)",
    )
    made.add_argument(
        "--caches",
        nargs="+",
        choices=("on", "off"),
        default=["on", "off"],
        help="run with the cache, without it, or both (default: both)",
    )
    made.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.1],
        metavar="PER_S",
        help="requests/s of the runs (default 0.1)",
    )
    made.add_argument(
        "--repeats", type=int, default=1, help="number of repeats, each with its own arrivals and prompts"
    )
    made.add_argument("--seed", type=int, default=1, help="seed of the first repeat (default %(default)s)")
    made.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="clock of all times: wall time, or CPU seconds of the server (default %(default)s)",
    )
    made.add_argument(
        "--layers", type=int, default=0, help="use only the first N layers of SmolLM2; 0: all thirty"
    )
    made.add_argument("--model", type=Path, help="model folder to use instead of SmolLM2")
    made.add_argument(
        "--at-once",
        action="store_true",
        help="run the servers with the cache and without at the same time; needs --clock cpu",
    )
    for name, default, meaning in (
        ("requests", 500, "number of requests"),
        ("shared-tokens", 320, "tokens that all prompts share"),
        ("own-tokens", 533, "tokens that each prompt has to itself"),
        ("answer-tokens", 150, "tokens of each answer"),
    ):
        made.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default %(default)s)"
        )
    made.add_argument("--json", type=Path, help="add every figure to this file")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.at_once and args.clock != "cpu":
        sys.exit("--at-once needs --clock cpu, because two servers share the machine")
    order = turns.at_once if args.at_once else turns.in_turns
    runs: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        runs = json.loads(args.json.read_text())["runs"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = _folder(args, Path(scratch)) if args.repeats else Path()
        for engine in args.engines:
            for wanted in order(args, engine):
                lacking = [about for about in wanted if not any(turns.made(run, about) for run in runs)]
                for made in _served(args, lacking, folder, Path(scratch)):
                    runs += made
                    # The file is written after each rate, so a run that is cut off loses one rate of one
                    # repeat.
                    write_json(args.json, {"runs": runs})
    show("**Serving** on real servers", *figures.table(runs))


def _folder(args: argparse.Namespace, scratch: Path) -> Path:
    folder: Path = args.model or find(SMOLLM2, progress=_say)
    return first_layers(folder, count=args.layers, into=scratch / "model") if args.layers else folder


def _served(
    args: argparse.Namespace, wanted: Sequence[dict[str, Any]], folder: Path, scratch: Path
) -> Iterator[list[dict[str, Any]]]:
    """Start the servers that these runs need. Neighbouring runs that send the same requests to different
    servers are made at the same time.
    """
    with contextlib.ExitStack() as stack:
        started = {
            cache: stack.enter_context(_server(args, wanted[0]["engine"], folder, scratch, cache=cache))
            for cache in dict.fromkeys(about["cache"] for about in wanted)
        }
        for _, alike in groupby(wanted, key=itemgetter("rate", "seed")):
            yield asyncio.run(_together(args, list(alike), started))


def _server(
    args: argparse.Namespace, engine: str, folder: Path, scratch: Path, *, cache: bool
) -> AbstractContextManager[RunningServer]:
    longest = args.shared_tokens + args.own_tokens + args.answer_tokens
    plan = ServerPlan(
        folder=folder,
        cache=cache,
        num_blocks=min(64, args.requests) * -(-longest // BLOCK_TOKENS) + 64,
        max_len_tokens=longest + BLOCK_TOKENS,
    )
    return servers.running(engine, plan, log=scratch / f"{engine}-{'on' if cache else 'off'}.log")


async def _together(
    args: argparse.Namespace, alike: Sequence[dict[str, Any]], started: dict[bool, RunningServer]
) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_run(args, about, started[about["cache"]]) for about in alike)))


async def _run(args: argparse.Namespace, about: dict[str, Any], server: RunningServer) -> dict[str, Any]:
    load = Load(
        requests=args.requests,
        shared_tokens=args.shared_tokens,
        own_tokens=args.own_tokens,
        answer_tokens=args.answer_tokens,
        rate_per_s=about["rate"],
        seed=about["seed"],
    )
    clock = CpuClock(server.pids) if args.clock == "cpu" else WallClock()
    run = await client.serve(server.url, MODEL_NAME, load, name=f"rate {about['rate']}", clock=clock)
    row = run.row()
    times = f"TTFT {row['TTFT ms']:.0f} ms, TPOT {row['TPOT ms']:.0f} ms, hits {row['hits']:.3f}"
    _say(f"{about['engine']}, cache {'on' if about['cache'] else 'off'}, {about['rate']}/s: {times}")
    return {**about, "load": os.getloadavg()[0], "row": row}


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
