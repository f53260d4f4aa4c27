"""Runs the bench from the command line: `make bench-dataplane` starts `python -m bench.dataplane`."""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.dataplane import report
from bench.dataplane.load import BadAnswerError
from bench.dataplane.measure import Bench, Results
from bench.dataplane.plan import Plan, compare_plan, full_plan, quick_plan, thousand_plan
from bench.dataplane.rig import running_rig

_ABOUT = """\
Measure what a request costs on its way through a real Envoy and the picker: CPU of the picker and of
Envoy for each request, and the time that Envoy and the picker add to the first byte of the answer.
"""
_READING = """\
how it is done:
  One client keeps a fixed number of requests in flight over kept HTTP/1.1 connections; the model servers
  answer with fixed bytes. All ways take turns within each round, in a new random order, so that noise
  of the machine meets each of them; the tables show medians over rounds, ratios within the same round,
  and half the distance between the quartiles after the ±.
how to read it:
  picker ms   CPU of the picker process, all threads, for each request, without its CPU when idle
  x floor     the same, as a multiple of a bare grpc.aio server that answers the same messages undecoded
  Envoy ms    CPU of Envoy for each request
  messages    ext_proc messages from Envoy for each request
  TTFT        milliseconds to the first byte of the answer's body. The CPU is busy in these tables; the
              table "one request at a time" shows what a quiet gateway adds
examples:
  make bench-dataplane                            everything, about seven minutes
  make bench-dataplane ARGS=--quick               under 90 seconds
  make bench-dataplane ARGS=--thousand            only 1,000 endpoints beside 4, in two minutes
  make bench-dataplane ARGS="--against ../old"    compare this picker with the picker of another checkout
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-dataplane",
        description=_ABOUT,
        epilog=_READING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer loads and rounds, in under 90 seconds"
    )
    parser.add_argument(
        "--thousand", action="store_true", help="compare only 1,000 endpoints with 4, in two minutes"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds for each load (default 5)")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="compare with the picker of the checkout in DIR"
    )
    return parser


class _Progress:
    """Shows which step runs: on a terminal in one line that changes in place, elsewhere in a line for each
    step.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._live = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        shown = f"{time.monotonic() - self._started:4.0f} s  {text}"
        sys.stderr.write(f"\r\x1b[K{shown}" if self._live else f"{shown}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")


async def _measure(plan: Plan, args: argparse.Namespace, progress: _Progress) -> Results:
    with tempfile.TemporaryDirectory(prefix="dataplane-") as directory:
        progress("starting Envoy, the pickers, the floor and the model servers")
        other = args.against.resolve() if args.against else None
        async with running_rig(Path(directory), endpoints=4, other=other) as rig:
            bench = Bench(
                rig,
                rounds=args.rounds or plan.rounds,
                turn_s=plan.turn_s,
                seed=1,
                report=progress,
            )
            for prompt_kb in plan.alone_kb:
                await bench.alone(
                    prompt_kb,
                    ("direct", "envoy", "floor", "ours", "ours-duplex"),
                    requests=plan.alone_requests,
                )
            for cell in plan.cells:
                await bench.run(cell)
            bypassed = await rig.bypassed()
            if bypassed:
                raise BadAnswerError(f"{bypassed} requests went on without their picker")
            return bench.results


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}"


def _plan(args: argparse.Namespace) -> Plan:
    if args.against:
        return compare_plan()
    if args.quick:
        return quick_plan()
    if args.thousand:
        return thousand_plan()
    return full_plan()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after the tables, 1 if an answer was wrong, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    if args.against and not (args.against / "epp").is_dir():
        print(f"{args.against} holds no checkout: there is no epp/ in it", file=sys.stderr)
        return 2
    plan = _plan(args)
    progress = _Progress()
    machine = _machine()
    # SIGTERM must also end the processes that the bench started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = uvloop.run(_measure(plan, args, progress))
    except BadAnswerError as error:
        progress.close()
        print(f"the run is void: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.close()
        return 130
    progress.close()
    shown = report.tables(results)
    print(f"{machine}\n\n{shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
