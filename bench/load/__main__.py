"""Runs load tests from the command line: `make load` starts `python -m bench.load`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.demo.address import Place, running
from bench.load.probe import LoadError, probe
from bench.load.report import text
from bench.load.run import SCENARIOS, Plan, run

_ABOUT = """\
Load a gateway with locust and print the results. Without --host, the gateway is that of this checkout's
`make run`. Options that are not listed here go to locust (docs/load-tests.md).
"""
_NO_DEMO = """\
There is no gateway to load. Either
  - start a gateway: `make run` in another terminal, and try again when it prints "The gateway stays up"; or
  - name a gateway: make load ARGS="--host http://NAME:PORT"
"""
_DEFAULT_TIME_S = 60
_FURTHER = {
    "--model": "model that requests name (default: the first one that the gateway lists)",
    "--think": "multiply all think times by X",
    "--prefixes": "number of shared beginnings",
    "--prefix-tokens": "approximate length of each shared beginning, in tokens",
    "--answer-tokens": "length of each answer, in tokens",
    "--silence": "count a request as failed after X seconds without a byte",
}
"""Options that are passed to the locust files. They are listed here, because otherwise the value of such an
option would be read as the scenario.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "scenario",
        nargs="?",
        default="conversation",
        choices=list(SCENARIOS),
        help="the load to send (default conversation)",
    )
    parser.add_argument("--host", default="", help="address of the gateway, http://NAME:PORT")
    parser.add_argument("--users", type=_positive, default=24, help="number of users (default 24)")
    parser.add_argument(
        "--spawn-rate", type=float, default=8.0, help="number of users that start in each second (default 8)"
    )
    parser.add_argument(
        "--time",
        type=_positive,
        default=0,
        help=f"length of the run in seconds (default {_DEFAULT_TIME_S})",
    )
    parser.add_argument(
        "--requests", type=_positive, default=0, help="end after this many requests, instead of after a time"
    )
    parser.add_argument(
        "--processes", type=_positive, default=1, help="number of generator processes (default 1)"
    )
    parser.add_argument(
        "--out", type=Path, help="directory of the reports (default: a new one under out/load)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all prompts (default 1)")
    load = parser.add_argument_group("options of the load; the locust files have the defaults")
    for option, meaning in _FURTHER.items():
        load.add_argument(option, metavar="X", help=meaning)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 for success, 1 if requests failed, 2 for a mistake in the options, 3 if the
    load could not run.
    """
    parser = _parser()
    args, further = parser.parse_known_args(argv)
    for option in _FURTHER:
        value = getattr(args, option.strip("-").replace("-", "_"))
        if value is not None:
            further += [option, value]
    try:
        return _load(args, further)
    except LoadError as error:
        print(f"\nThe load cannot run: {error}", file=sys.stderr)
        return 3


def _load(args: argparse.Namespace, further: Sequence[str]) -> int:
    plan = _plan(args, further, host=args.host or _demo().gateway)
    how_long = f"{plan.time_s} s" if plan.time_s else f"{args.requests} requests"
    print(
        f"{plan.scenario} against {plan.host}, {how_long}; follow it with: tail -f {plan.log_file}",
        flush=True,
    )
    record = run(plan)
    print(f"\n{text(record)}\n\nReport: {plan.directory / 'locust.html'}", flush=True)
    return 1 if record.figures.failed else 0


def _plan(args: argparse.Namespace, further: Sequence[str], *, host: str) -> Plan:
    scenario: str = args.scenario
    served = probe(host, model=args.model or "")
    if scenario == "lora" and not served.adapters:
        raise LoadError(f"{host} serves no LoRA adapter: start the model servers with some")
    options = ["--seed", str(args.seed), *further]
    if args.requests:
        options += ["--requests", str(args.requests)]
    directory = args.out or Path("out/load") / time.strftime(f"{scenario}-%Y%m%d-%H%M%S")
    return Plan(
        scenario=scenario,
        host=host,
        users=args.users,
        spawn_per_s=args.spawn_rate,
        time_s=args.time or (0 if args.requests else _DEFAULT_TIME_S),
        processes=args.processes,
        label=scenario,
        directory=directory.resolve(),
        options=options,
    )


def _demo() -> Place:
    places = running()
    if not places:
        raise LoadError(_NO_DEMO)
    if len(places) > 1:
        print(
            f"{len(places)} demos of this checkout are running; the load goes to the latest one, {places[0].gateway}"
        )
    return places[0]


if __name__ == "__main__":
    sys.exit(main())
