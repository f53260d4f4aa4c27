"""Runs the live comparison from the command line."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec

from bench.routing.live import vllm
from bench.routing.live.report import is_late, report
from bench.routing.live.rules import DEFAULTS, product_of
from bench.routing.live.run import Case, Result, live, settled, simulate
from bench.routing.live.small import NUM_SERVERS, WORKLOADS, server_flags
from tests.harness.model_servers import running_model_servers

_ABOUT = """\
Sends small versions of the routing benchmark's workloads through a real Envoy and a real picker to model-server processes on the real clock, and runs the same requests in the simulator. Shows how far real processes and simulator rank the rules alike. Rules of other projects answer Envoy from the generator's process.
"""
_EXAMPLES = """\
examples:
  python -m bench.routing.live --workloads b2b --rules least-cost,round-robin --repeats 1
      a minute and a half
  python -m bench.routing.live --store live.jsonl --most-s 480
      all, in pieces: the same command continues a run that was cut off
  python -m bench.routing.live --workloads chat,b2b --rules least-cost,least-cost*4,least-cost/4
      one picker, four that share over a real Redis, and four that do not
  python -m bench.routing.live --servers vllm --repeats 1 --seconds 45 --store vllm.jsonl
      real vLLM servers: about ten minutes
  python -m bench.routing.live --read live.jsonl
      print the results in the file
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing.live",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="run two workloads and three rules once, in two or three minutes"
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        metavar="A,B",
        help="workloads to run (default %(default)s)",
    )
    parser.add_argument(
        "--servers",
        choices=("ours", "vllm"),
        default="ours",
        help="servers behind the gateway; vllm: four real vLLM servers on the CPU with SmolLM2, only conversations and rules of the picker (default %(default)s)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="model that vLLM serves instead of SmolLM2"
    )
    parser.add_argument(
        "--rules",
        metavar="A,B",
        help=f"rules to compare (default {','.join(DEFAULTS)}; with vLLM {','.join(vllm.DEFAULTS)})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="number of repeats; rules take turns within each (default %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds of arrivals in a run (default %(default)s)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="PATH",
        help="add results to this file, and make only runs that are missing or were late",
    )
    parser.add_argument(
        "--most-s",
        type=float,
        default=float("inf"),
        metavar="S",
        help="begin no live run after this many seconds",
    )
    parser.add_argument(
        "--read", type=Path, metavar="PATH", help="print the results of this file, and run nothing"
    )
    parser.add_argument(
        "--late",
        action="store_true",
        help="also count runs whose generator was late (default: they are left out)",
    )
    return parser


def main() -> int:
    args = _parser().parse_args()
    if args.servers == "vllm":
        return vllm.main(args)
    args.rules = args.rules or ",".join(DEFAULTS)
    if args.quick:
        args.workloads, args.rules, args.repeats = "b2b,chat", "least-cost,round-robin,sgl", 1
    if args.read:
        print(report(list(_stored(args.read)), late=args.late))
        return 0
    cases = _cases(args)
    results = list(_stored(args.store)) if args.store else []
    known = {result.key for result in results if not is_late(result)}
    todo = [case for case in cases if (*_key(case), "live") not in known]
    fresh = [simulate(case) for case in cases if (*_key(case), "simulated") not in known]
    results += _kept(fresh, args.store)
    try:
        results += asyncio.run(_live(todo, store=args.store, most_s=args.most_s))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    print(report(results, late=args.late))
    return 1 if any(result.failures for result in results) else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    workloads, rules = args.workloads.split(","), args.rules.split(",")
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown:
        sys.exit(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    try:
        for rule in rules:
            product_of(rule)
    except ValueError as error:
        sys.exit(str(error))
    return [
        Case(workload, rule, seed, args.seconds)
        for seed in range(1, args.repeats + 1)
        for workload in workloads
        for rule in [*rules[seed % len(rules) :], *rules[: seed % len(rules)]]
    ]


def _key(case: Case) -> tuple[str, str, int, float]:
    return (case.workload, case.rule, case.seed, case.seconds)


def _stored(path: Path) -> Iterator[Result]:
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=Result)


def _kept(results: list[Result], store: Path | None) -> list[Result]:
    if store:
        with store.open("ab") as file:
            file.writelines(msgspec.json.encode(result) + b"\n" for result in results)
    return results


async def _live(cases: list[Case], *, store: Path | None, most_s: float) -> list[Result]:
    until = time.monotonic() + most_s
    task = asyncio.current_task()
    assert task is not None
    # a cancelled task ends its processes, so none is left behind
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results: list[Result] = []
    if not cases:
        return results
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        directory = Path(folder)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            running_model_servers(directory, count=NUM_SERVERS, flags=server_flags()) as servers,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        ):
            for number, case in enumerate(cases):
                if time.monotonic() >= until:
                    print(f"{len(cases) - number} live runs are left", file=sys.stderr)
                    break
                own = directory / f"run-{number}"
                own.mkdir()
                await settled(session, servers)
                result = await live(case, servers=servers, session=session, directory=own)
                results += _kept([result], store)
                print(f"{number + 1}/{len(cases)} {case}: {result.row.ttft_mean_s:.3f} s", file=sys.stderr)
    return results


if __name__ == "__main__":
    sys.exit(main())
