"""Runs the routing benchmark from the command line."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.routing.bench import Result, Setting, calibrate, costs_of, plan_runs, run_all, saturation
from bench.routing.catalog import BY_NAME, CONFIGS, NEAR, RIVALS, is_ours
from bench.routing.drawn_workloads import drawn
from bench.routing.more_workloads import MORE, PUBLIC, UNTUNED
from bench.routing.report import cells_of, goals, report
from bench.routing.store import Store, code_of, named
from bench.routing.workloads import SPECS, label

_ABOUT = """\
Compares routing rules in a simulated fleet. Our rules run the real picker's own code; other projects' rules are
re-implementations. Every run is determined by its seed. Capacity is measured for each workload first (requests a second
with a fixed number always in flight, by our score with exact knowledge), and loads are shares of this capacity.
"""

_EXAMPLES = """\
examples:
  python -m bench.routing --quick
      four workloads, one load, fewer rules and requests: under two minutes
  python -m bench.routing --workloads b2b,chat --rules least-cost,lpwl,sgl --loads 0.9 --seeds 3
  python -m bench.routing --store results.jsonl --rules all
      add every run to the file, and make only the runs that it lacks (our rules run again if the picker's code has changed)
  python -m bench.routing --read results.jsonl
      print the results of earlier runs
"""

_QUICK_WORKLOADS = ("conversation", "b2b", "hot", "chat")
_LOADS_OF = {"saturation": saturation, "capacity": calibrate, "rate": lambda *_: (1.0, 1.0)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="run a short version of everything")
    add(
        "--workloads",
        default="",
        metavar="A,B",
        help=f"of {', '.join(SPECS)} (default: all of these), or of {', '.join(MORE)}; `all` of both; "
        f"or of {', '.join(UNTUNED)}; `untuned`: all of these; or of {', '.join(PUBLIC)}; `drawn-N`: a workload drawn from the number N",
    )
    add(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="use this trace as one more workload",
    )
    add(
        "--rules",
        default="defaults",
        metavar="A,B",
        help="names, `defaults`, `near` (ten others that come near ours), `all` or `ours`; --list shows them",
    )
    add("--loads", default="", metavar="X,Y", help="loads, as shares of --load-of (default 0.5,0.8,1.0,1.2)")
    add(
        "--load-of",
        choices=_LOADS_OF,
        default="saturation",
        help="capacity that loads are shares of: the highest rate of the fleet (default), its rate with 16 requests in flight at each server, or one request a second (`rate`; a closed loop has one user)",
    )
    add("--seeds", type=int, default=0, metavar="N", help="number of seeds (default 3)")
    add("--scale", type=float, default=0.0, metavar="X", help="send X times the usual number of requests")
    _add_fleet(parser)
    add(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of runs at the same time (default %(default)s)",
    )
    add(
        "--store",
        type=Path,
        metavar="PATH",
        help="add the figures to this file, and make only the runs that it lacks",
    )
    add(
        "--read",
        type=Path,
        action="append",
        metavar="PATH",
        help="print the figures of this file, and run nothing",
    )
    add("--list", action="store_true", help="print the rules and their settings, and run nothing")
    return parser


def _costs(text: str) -> str:
    costs_of(text)
    return text


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the fleet").add_argument
    add("--servers", type=int, default=8, metavar="N", help="number of servers (default %(default)s)")
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of our pickers (default %(default)s)",
    )
    add(
        "--share-delay",
        type=float,
        metavar="S",
        help="delay until our replicas know each other's picks (default: they never know them)",
    )
    add(
        "--scrape-interval",
        type=float,
        default=Setting().scrape_interval_s,
        metavar="S",
        help="seconds between two scrapes (default %(default)s)",
    )
    add(
        "--unlike",
        type=int,
        default=0,
        metavar="N",
        help="number of servers with half the speed and half the cache",
    )
    add("--block-tokens", type=int, default=0, help="tokens in a block (default: as the workload says)")
    add("--step-tokens", type=int, default=2048, help="most tokens in a step (default %(default)s)")
    add("--failing", type=int, default=0, metavar="N", help="number of servers that break off every answer")
    add(
        "--costs",
        type=_costs,
        default="",
        metavar="A=X,B=Y",
        help="constants of the servers' cost model (`model_server.runners.cost`), as decode_step_s=0.016",
    )


def main() -> int:
    args = _parser().parse_args()
    if args.list:
        for config in CONFIGS:
            print(f"{config.name:20} {dict(config.settings) or ''}")
        return 0
    results = [r for path in args.read for r in Store(path).results()] if args.read else _run(args)
    cells = cells_of(results)
    print(report(cells))
    print("\nThe default rule against the best other rule:\n")
    print(goals(cells))
    return 0


def _rules(text: str) -> list[str]:
    if text in ("defaults", "all"):
        return ["least-cost", "affinity", *RIVALS]
    if text == "near":
        return list(NEAR)
    if text == "ours":
        return [name for name in BY_NAME if is_ours(name)]
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        sys.exit(f"no such rule: {', '.join(unknown)} (--list shows them)")
    return names


def _workloads(text: str, *, quick: bool) -> list[str]:
    if text == "all":
        return [*SPECS, *MORE]
    if text == "untuned":
        return list(UNTUNED)
    names = [name for name in text.split(",") if name]
    there_are = (*SPECS, *MORE, *UNTUNED, *PUBLIC)
    unknown = [name for name in names if name not in there_are and drawn(name) is None]
    if unknown:
        sys.exit(f"no such workload: {', '.join(unknown)} (there are {', '.join(there_are)}, drawn-N)")
    return names or (list(_QUICK_WORKLOADS) if quick else list(SPECS))


def _setting(args: argparse.Namespace) -> Setting:
    return Setting(
        num_servers=args.servers,
        scale=args.scale or (0.3 if args.quick else 1.0),
        replicas=args.replicas,
        share_delay_s=args.share_delay,
        scrape_interval_s=args.scrape_interval,
        unlike=args.unlike,
        costs=args.costs,
        block_tokens=args.block_tokens,
        step_tokens=args.step_tokens,
        failing=args.failing,
    )


def _run(args: argparse.Namespace) -> list[Result]:
    quick = args.quick
    rules = ["rr", *NEAR] if quick and args.rules == "defaults" else _rules(args.rules)
    names = [*_workloads(args.workloads, quick=quick), *map(str, args.trace)]
    loads = [float(x) for x in args.loads.split(",") if x] or ([0.8] if quick else [0.5, 0.8, 1.0, 1.2])
    seeds = range(1, 1 + (args.seeds or (1 if quick else 3)))
    setting = _setting(args)
    store = Store(args.store, code=code_of()) if args.store else None
    capacities = {}
    for name in names:
        capacities[name] = _LOADS_OF[args.load_of](name, setting)
        print(f"{args.load_of} of {label(name)}: {capacities[name][0]:.2f} requests/s", file=sys.stderr)
    runs = plan_runs(names, rules, loads=loads, seeds=seeds, setting=setting, capacities=capacities)
    todo = store.missing(runs, anew=filter(is_ours, rules)) if store else runs
    results = run_all(todo, processes=args.processes)
    done = list(_progress(store.keeping(results) if store else results, len(todo)))
    if store is None:
        return done
    wanted = set(map(named, runs))
    return [result for result in store.results() if result.run in wanted]


def _progress(results: Iterable[Result], total: int) -> Iterator[Result]:
    started = time.monotonic()
    for number, result in enumerate(results, start=1):
        yield result
        if number % 50 == 0:
            print(f"{number}/{total} runs, {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
