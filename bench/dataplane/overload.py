"""Measures a picker with too much work behind a real Envoy: how long requests wait for the picker, and how
many of them it still reads.

    python -m bench.dataplane.overload [--load 2] [--seconds 8] [--core 0.25] [--slow evenly,quota] [--of
    http2,grpcio]

The picker is limited to a part of a core (bench/dataplane/slowing.py), which needs root. First the bench
finds the picker's capacity: requests a second with as many in flight as keep it busy, all of them read. Then
it sends `load` times as many requests at an even rate, whether earlier ones are answered or not. Times are
those to the first byte of the answer, including Envoy and the model server. At the
end the bench sends fewer requests than the picker can handle, to see that the picker has recovered.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import uvloop

from bench.dataplane.load import Client, Connection, Prompts
from bench.dataplane.rig import running_picker, written_config
from bench.dataplane.slowing import by_quota, evenly, run_before_others
from epp.base.types import Address
from epp.config.settings import Config
from tests.harness.envoy import EnvoyProcess, running_envoy
from tests.harness.ports import free_ports
from tests.harness.processes import connects, managed_process

_ENDPOINTS: Final = 4
_CONNECTIONS: Final = 400
_MOST: Final = 1000
"""The most requests a second. With more, the client and Envoy are the slow parts."""
_LATE_S: Final = 0.1
SLOWED: Final = {"evenly": evenly, "quota": by_quota}


async def at_rate(port: int, prompts: Prompts, *, rate: float, seconds: float) -> list[float]:
    """Return the seconds to the first byte of each answer."""
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    for _ in range(_CONNECTIONS):
        idle.append((await loop.create_connection(Connection, "127.0.0.1", port))[1])
    everyone, took, tasks = list(idle), [], []

    async def one(due: float) -> None:
        connection = idle.pop() if idle else (await loop.create_connection(Connection, "127.0.0.1", port))[1]
        began = time.perf_counter()
        took.append(began - due + await connection.request(prompts.next()))
        idle.append(connection)

    started = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = started + number / rate
        if due > (now := time.perf_counter()):
            await asyncio.sleep(due - now)
        tasks.append(loop.create_task(one(due)))
    await asyncio.gather(*tasks)
    for connection in everyone:
        connection.close()
    return took


async def _counter(config: Config, name: str) -> float:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{config.admin.address}/metrics") as page,
    ):
        lines = (await page.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@dataclass(frozen=True, slots=True)
class Trial:
    capacity: float
    """The most requests a second of which the picker reads all."""
    took_s: Sequence[float]
    read: float
    passed_by: int
    afterwards: float
    """The share of the requests after the overload that the picker read. These requests are within its
    capacity.
    """

    def text(self, *, seconds: float) -> str:
        cuts = statistics.quantiles(self.took_s, n=100)
        late = sum(t > _LATE_S for t in self.took_s)
        return (
            f"capacity {self.capacity:4.0f} requests/s; ms to the first byte: p50 {cuts[49] * 1000:4.0f}, "
            f"p90 {cuts[89] * 1000:4.0f}, p99 {cuts[98] * 1000:4.0f}, most {max(self.took_s) * 1000:4.0f}; "
            f"{late} of {len(self.took_s)} over 100 ms; read {self.read:.0f}, "
            f"{self.read / (self.capacity * seconds):.2f} of the capacity; {self.passed_by} bypassed the picker; "
            f"after the overload {self.afterwards:.2f} read"
        )


async def _trial(config: Config, envoy: EnvoyProcess, args: argparse.Namespace) -> Trial:
    port = int(config.envoy.listen.rpartition(":")[2])
    prompts = Prompts(size_bytes=int(args.kb * 1000), chunks=1, kind="cold", seed=1)
    client = Client(port)
    found = await client.burst(prompts, in_flight=3, seconds=3.0)
    client.close()
    capacity = found.requests / found.seconds
    rate = min(args.load * capacity, _MOST)
    await asyncio.sleep(2)

    async def unread() -> float:
        return await _counter(config, "epp_unread_bodies_total{")

    unread_before, passed_before = await unread(), await _bypassed(envoy)
    took = await at_rate(port, prompts, rate=rate, seconds=args.seconds)
    passed, left_out = await _bypassed(envoy) - passed_before, await unread() - unread_before
    await asyncio.sleep(1)
    unread_before = await unread()
    calm = await at_rate(port, prompts, rate=0.7 * capacity, seconds=3.0)
    left_out_later = await unread() - unread_before
    return Trial(
        capacity=capacity,
        took_s=took,
        read=len(took) - left_out - passed,
        passed_by=passed,
        afterwards=1 - left_out_later / len(calm),
    )


async def _bypassed(envoy: EnvoyProcess) -> int:
    stats = await envoy.stats("http.")
    return sum(value for key, value in stats.items() if key.endswith("ext_proc.failure_mode_allowed"))


async def _behind_envoy(name: str, slow: str, args: argparse.Namespace) -> Trial:
    with tempfile.TemporaryDirectory(prefix="overload-") as made:
        directory, ports = Path(made), free_ports(_ENDPOINTS)
        addresses: Sequence[Address] = [Address("127.0.0.1", port) for port in ports]
        command = [sys.executable, "-m", "bench.dataplane.upstream", *map(str, addresses)]
        async with managed_process("upstream", command, directory=directory) as upstream:
            await upstream.wait_ready(lambda: connects("127.0.0.1", ports[-1]))
            own = directory / "ours"
            config = written_config(own, addresses, share=0.0, transport=name)
            async with (
                running_picker(config, directory=own) as server,
                running_envoy(config, directory=directory) as envoy,
            ):
                await envoy.wait_endpoints({str(a) for a in addresses})
                with SLOWED[slow](args.core, server.pid):
                    return await _trial(config, envoy, args)


async def _main(args: argparse.Namespace) -> None:
    print(
        f"{args.core} of a core; requests of {args.kb} KB, {args.load} times the capacity, for {args.seconds:.0f} s"
    )
    for slow in args.slow.split(","):
        for name in args.of.split(","):
            trial = await _behind_envoy(name, slow, args)
            print(f"{slow:7} {name:9} {trial.text(seconds=args.seconds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load", type=float, default=2.0, help="load as a multiple of the capacity (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=8, help="length of the overload (default %(default)s)"
    )
    parser.add_argument(
        "--core", type=float, default=0.25, help="share of a core for the picker (default %(default)s)"
    )
    parser.add_argument("--kb", type=float, default=1.5, help="size of a request in KB (default %(default)s)")
    parser.add_argument(
        "--slow",
        default="evenly,quota",
        help="ways in which the picker is limited, of evenly, quota (default %(default)s)",
    )
    parser.add_argument(
        "--of",
        default="http2,grpcio",
        help="transports to measure, of http2, grpcio (default %(default)s)",
    )
    arguments = parser.parse_args()
    run_before_others()
    uvloop.run(_main(arguments))


if __name__ == "__main__":
    main()
