"""A picker with too much to do, behind a real Envoy: how long requests wait for it, and how many it still reads.

    python -m bench.dataplane.overload [--rate 600] [--seconds 8] [--core 0.125] [--kb 1.5] [--transport grpcio]

The picker is held to a part of a core by a cgroup with periods of 10 ms, which takes root. First its capacity is found: requests a
second with as many in flight as keep it busy, all of them read. Then requests come at an even rate, whether answered or not. Times are those to
the first byte of the answer, with Envoy and the model server in them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import uvloop

from bench.dataplane.load import Client, Connection, Prompts
from bench.dataplane.rig import running_picker, written_config
from epp.config.settings import Config
from epp.types import Address
from tests.harness.envoy import EnvoyProcess, running_envoy
from tests.harness.ports import free_ports
from tests.harness.processes import connects, managed_process

_ENDPOINTS: Final = 4
_PERIOD_US: Final = 10_000
_CONNECTIONS: Final = 400
_LATE_S: Final = 0.1


@contextlib.contextmanager
def held_to(core: float, pid: int) -> Iterator[None]:
    """Let a process use so much of a core, in every 10 ms."""
    quota_us, old = int(core * _PERIOD_US), Path("/sys/fs/cgroup/cpu").is_dir()
    group = _own_group(old=old) / f"picker-{pid}"
    group.mkdir()
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


def _own_group(*, old: bool) -> Path:
    """The cgroup that this process is in; old: of the first version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("cpu" in controllers.split(",")) if old else not controllers:
            return Path("/sys/fs/cgroup/cpu" if old else "/sys/fs/cgroup") / path.lstrip("/")
    raise FileNotFoundError("no cgroup limits the CPU of this process")


async def at_rate(port: int, prompts: Prompts, *, rate: float, seconds: float) -> list[float]:
    """Seconds to the first byte of each answer."""
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


async def _trial(config: Config, envoy: EnvoyProcess, args: argparse.Namespace) -> None:
    port = int(config.envoy.listen.rpartition(":")[2])
    prompts = Prompts(size_bytes=int(args.kb * 1000), chunks=1, kind="cold", seed=1)
    client = Client(port)
    found = await client.burst(prompts, in_flight=3, seconds=3.0)
    client.close()
    capacity = found.requests / found.seconds
    await asyncio.sleep(2)
    unread, bypassed = "epp_unread_bodies_total{", "ext_proc.failure_mode_allowed"
    before = await _counter(config, unread), await _bypassed(envoy, bypassed)
    took = await at_rate(port, prompts, rate=args.rate, seconds=args.seconds)
    unread_now, bypassed_now = await _counter(config, unread), await _bypassed(envoy, bypassed)
    cuts = statistics.quantiles(took, n=100)
    passed = bypassed_now - before[1]
    read = len(took) - (unread_now - before[0]) - passed
    print(
        f"{args.transport}: {args.core} of a core reads {capacity:.0f} requests of {args.kb} KB a second; {args.rate:.0f} a second for"
        f" {args.seconds:.0f} s: ms p50 {cuts[49] * 1000:.0f}, p90 {cuts[89] * 1000:.0f}, p99 {cuts[98] * 1000:.0f},"
        f" at most {max(took) * 1000:.0f}; {sum(t > _LATE_S for t in took)} of {len(took)} over 100 ms; read {read:.0f},"
        f" {read / (capacity * args.seconds):.2f} of what it could; passed it by {passed:.0f}"
    )


async def _bypassed(envoy: EnvoyProcess, name: str) -> int:
    return sum(value for key, value in (await envoy.stats("http.")).items() if key.endswith(name))


async def _main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="overload-") as made:
        directory, ports = Path(made), free_ports(_ENDPOINTS)
        addresses: Sequence[Address] = [Address("127.0.0.1", port) for port in ports]
        command = [sys.executable, "-m", "bench.dataplane.upstream", *map(str, ports)]
        async with managed_process("upstream", command, directory=directory) as upstream:
            await upstream.wait_ready(lambda: connects("127.0.0.1", ports[-1]))
            own = directory / "ours"
            config = written_config(own, addresses, share=0.0, transport=args.transport)
            async with (
                running_picker(config, directory=own) as picker,
                running_envoy(config, directory=directory) as envoy,
            ):
                await envoy.wait_endpoints({str(a) for a in addresses})
                with held_to(args.core, picker.pid):
                    await _trial(config, envoy, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=600)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--core", type=float, default=0.125)
    parser.add_argument("--kb", type=float, default=1.5)
    parser.add_argument("--transport", choices=("http2", "grpcio"), default="http2")
    uvloop.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
