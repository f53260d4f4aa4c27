"""Runs the comparison on real vLLM servers from the command line: `make bench-live`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bench.routing.live import vllm, vllm_report
from epp.config.policy import RuleName

_ABOUT = """\
Sends conversations through a real Envoy and a real picker to four real vLLM servers on the CPU, and runs the same
requests in the simulator. Shows what each rule does, and whether the simulator ranks the rules in the same order.
"""
_EXAMPLES = """\
examples:
  python -m bench.routing.live --rules least-cost,round-robin --repeats 1
      a few minutes
  python -m bench.routing.live --repeats 2 --store vllm.jsonl --most-s 480
      all, in pieces: the same command continues a run that was cut off
  python -m bench.routing.live --store vllm.jsonl --repeats 0
      print the results in the file
"""
_RULES: tuple[RuleName, ...] = get_args(RuleName)


def _rules(text: str) -> Sequence[RuleName]:
    names = text.split(",")
    unknown = [name for name in names if name not in _RULES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such rule: {', '.join(unknown)}; there are {', '.join(_RULES)}")
    return [rule for name in names for rule in _RULES if rule == name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing.live",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="model that vLLM serves (default: SmolLM2-135M)")
    add("--rules", type=_rules, default=vllm.DEFAULTS, metavar="A,B", help="rules of the picker to compare")
    add("--repeats", type=int, default=1, metavar="N", help="number of seeds (default %(default)s)")
    add("--serial", action="store_true", help="one client with one request at a time, not conversations")
    add("--seconds", type=float, default=45.0, metavar="S", help="arrivals of a run (default %(default)s)")
    add("--store", type=Path, metavar="PATH", help="add results to this file, and make only missing runs")
    add("--most-s", type=float, default=float("inf"), metavar="S", help="begin no run after these seconds")
    return parser


def main() -> int:
    args = _parser().parse_args()
    setting = replace(vllm.SETTING, serial=args.serial)
    found = [run for run in vllm.stored(args.store) if run.serial == setting.serial]
    known = {(run.rule, run.seed, run.seconds) for run in found}
    cases = [
        (rule, seed)
        for seed in range(1, args.repeats + 1)
        for rule in [*args.rules[seed % len(args.rules) :], *args.rules[: seed % len(args.rules)]]
        if (rule, seed, args.seconds) not in known
    ]
    if cases:
        found += asyncio.run(
            vllm.runs_of(
                cases,
                setting=setting,
                seconds=args.seconds,
                model=args.model,
                store=args.store,
                most_s=args.most_s,
            )
        )
    print(vllm_report.report(found))
    return 1 if any(run.failures for run in found) else 0


if __name__ == "__main__":
    sys.exit(main())
