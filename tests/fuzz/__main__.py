"""`make fuzz`: generated input for one entry or all of them, for as long as wanted. Inputs that fail are
written to build/fuzz. --hunt looks for the most costly input of each entry instead, by lines of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.entries import ENTRIES
from tests.fuzz.hunting import HUNTED, hunt
from tests.fuzz.listening import LISTENING
from tests.fuzz.run import FindingError, feed

FOUND = Path("build/fuzz")


async def fuzz(name: str, *, seed: int, size_bytes: int, folder: Path) -> None:
    started = time.monotonic()
    if name in ENTRIES:
        fed = await feed(name, ENTRIES[name](), seed=seed, size_bytes=size_bytes, folder=FOUND)
    else:
        async with LISTENING[name](folder) as entry:
            fed = await feed(name, entry, seed=seed, size_bytes=size_bytes, folder=FOUND)
    print(
        f"{name:15} {fed.inputs:8} inputs {fed.size_bytes:12,} bytes {fed.refused:8} refused {fed.grown_blocks:7} blocks more "
        f"{time.monotonic() - started:6.1f} s",
        flush=True,
    )


async def hunted(name: str, *, seed: int, inputs: int) -> None:
    worst = await hunt(name, ENTRIES[name](), seed=seed, inputs=inputs)
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / f"{name}-costly").write_bytes(worst.data)
    print(
        f"{name:15} {worst.lines:8,} lines {len(worst.data):8,} bytes {worst.share:6.2f} of what is allowed",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--entry", choices=[*ENTRIES, *LISTENING], help="entry to test (default: all entries)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=1.0, help="megabytes of input for each entry (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="seed of the input (default: a new one)"
    )
    parser.add_argument(
        "--hunt", type=int, default=0, metavar="INPUTS", help="hunt for costly inputs instead, among so many"
    )
    args = parser.parse_args()
    print(f"seed {args.seed}")
    if args.hunt:
        for name in [args.entry] if args.entry else HUNTED:
            asyncio.run(hunted(name, seed=args.seed, inputs=args.hunt))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.entry] if args.entry else [*ENTRIES, *LISTENING]:
            try:
                asyncio.run(
                    fuzz(name, seed=args.seed, size_bytes=int(args.megabytes * 1e6), folder=Path(folder))
                )
            except FindingError as error:
                print(
                    f"{error}\nkept in {FOUND}; move it to tests/fuzz/seeds/{name}/ once the fault is repaired",
                    file=sys.stderr,
                )
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
