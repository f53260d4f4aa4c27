"""Runs the whole gateway under a mixed load: `make soak`. Meanwhile the run kills pickers, flushes Redis, and
lets one attacker after the other at the gateway.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.soak.run import soak
from bench.tables import show


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the run (default %(default)s)")
    parser.add_argument("--users", type=int, default=12, help="number of clients at the same time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = soak(60 * args.minutes, users=args.users, attacks=True, directory=Path(folder))
        report = asyncio.run(run)
    print(f"requests: {dict(report.seen.sent)}; failed: {report.seen.faults}")
    print(f"pickers killed: {report.done['kill']}; Redis flushed: {report.done['flush']}")
    for pid, (middle, end) in report.grown_mib().items():
        print(f"worker {pid}: {middle:.1f} MiB in the middle of its life, {end:.1f} MiB at the end")
    columns = "attacker, MB/s, usual requests, failed, ms p50, ms p99, share of the sick server, promise"
    show("What each attacker costs the others", columns.split(", "), report.rows())
    for fault in report.faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    print("no request failed, no memory grew, and no booking is left" if not report.faults else "not good")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
