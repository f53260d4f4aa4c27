"""Measures many requests that flow control holds, behind a real Envoy: their cost while nothing happens, and
their results when the picker ends.

    python -m bench.load.waiting --requests 5000 --end SIGTERM

The only server is a server of the tests. It answers at once, and its metrics page says that it is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from bench.dataplane.cpu import cpu_s
from tests.harness.gateway import Gateway
from tests.harness.held_requests import busy, wait_for, waiting

_AT_ONCE = 50
"""The number of requests that are sent together. More would be an overload, in which some requests are not
read.
"""
_BETWEEN_S = 0.2
_MOST_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=5000, help="number of waiting requests (default 5000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds without new requests (default 10)"
    )
    parser.add_argument(
        "--end",
        choices=("SIGTERM", "SIGKILL"),
        default="SIGTERM",
        help="signal that ends the picker (default SIGTERM)",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waiting-") as name:
        asyncio.run(_measure(Path(name), args))
    return 0


async def _measure(directory: Path, args: argparse.Namespace) -> None:
    flow = {"ttlSeconds": _MOST_S}
    envoy = {"maxMessageTimeoutSeconds": 2 * _MOST_S, "maxConnections": 2 * args.requests}
    async with (
        busy(directory, flow, envoy=envoy) as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        pids = {"picker": gateway.picker.process.pid, "Envoy": gateway.envoy.process.pid}
        before = {name: _mib(pid) for name, pid in pids.items()}
        tasks = await _hold(gateway, session, args.requests)
        print(f"{await waiting(gateway):g} of {args.requests} requests wait")
        began, spent = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
        await asyncio.sleep(args.seconds)
        for name, pid in pids.items():
            cores = (cpu_s(pid) - spent[name]) / (time.monotonic() - began)
            print(
                f"{name}: {cores:.3f} of a core while nothing happens; {before[name]} MiB, then {_mib(pid)}"
            )
        gateway.picker.process.signal(signal.Signals[args.end])
        began = time.monotonic()
        statuses = dict(Counter(await asyncio.gather(*tasks)))
        seconds, passed_by = time.monotonic() - began, await gateway.envoy.bypassed()
        print(f"{args.end}: answered {statuses} within {seconds:.1f} s; {passed_by:g} bypassed the picker")


async def _hold(gateway: Gateway, session: aiohttp.ClientSession, requests: int) -> list[asyncio.Task[int]]:
    async def ask(number: int) -> int:
        body = {"model": "m", "prompt": f"{number} " * 200}
        async with session.post(f"{gateway.envoy.url}/v1/completions", json=body) as response:
            await response.read()
            return response.status

    tasks: list[asyncio.Task[int]] = []
    for number in range(requests):
        tasks.append(asyncio.create_task(ask(number)))
        if number % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(_BETWEEN_S)
    await wait_for(gateway, requests - sum(task.done() for task in tasks))
    return tasks


def _mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


if __name__ == "__main__":
    sys.exit(main())
