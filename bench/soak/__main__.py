"""Runs the whole gateway under a mixed load: `make soak`. Meanwhile the run kills pickers, flushes Redis, and
lets one attacker after the other at the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.soak.run import Plan, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the run (default %(default)s)")
    parser.add_argument("--users", type=int, default=12, help="number of clients at the same time")
    args = parser.parse_args()
    seconds = args.minutes * 60
    plan = Plan(
        seconds=seconds,
        users=args.users,
        kill_every_s=max(20.0, seconds / 4),
        flush_every_s=max(7.0, seconds / 20),
        sample_every_s=max(2.0, seconds / 60),
        attacks=True,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(soak(plan, directory=Path(folder), say=lambda line: print(line, flush=True)))
    print(f"requests: {dict(report.seen.sent)}; failed: {report.seen.failed.total()}")
    print(
        f"pickers killed: {report.kills}; Redis flushed: {report.flushes}; tasks before and after: {report.tasks}"
    )
    for pid, (middle, end) in report.grown_mib().items():
        print(f"worker {pid}: {middle:.1f} MiB in the middle of its life, {end:.1f} MiB at the end")
    print("\n| attacker | usual requests | failed | p50, ms | p99, ms |\n| --- | --- | --- | --- | --- |")
    for name, seconds_of in report.seen.seconds.items():
        p50, p99 = (1000 * sorted(seconds_of)[int(q * len(seconds_of))] for q in (0.5, 0.99))
        failed = report.seen.failed_under[name]
        print(f"| {name or 'none'} | {len(seconds_of)} | {failed} | {p50:.0f} | {p99:.0f} |")
    for fault in report.faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    print("no request failed, no memory grew, and no booking is left" if not report.faults else "not good")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
