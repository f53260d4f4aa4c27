"""Overloads a real gateway, with flow control or without it. Envoy, the picker, two model servers, and users
of two priorities and three tenants take part.

    python -m bench.load.overload --seconds 300
    python -m bench.load.overload --seconds 300 --mode Direct     the same without flow control

The servers are this repository's model servers, with made-up costs. The bench ends with a table by tenant and
priority, from locust's own figures, and with the shares of the tenants: prompt tokens at priority 0, from the
picker's recording, up to the moment at which the first tenant had no more requests.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp

from bench.demo.fleet import running_fleet
from bench.demo.serving import made_up
from bench.load.run import Plan, run
from epp.recording.lines import RecordedRequest, decode
from tests.harness.gateway import write_policy
from tests.harness.processes import wait_until

_FLOW = {
    "deadlineSeconds": 5,
    "objectives": {"interactive": 10},
    "ttlSeconds": 30,
}
_LOOK_S = 1.0
_WAITING = "epp_flow_waiting_requests"
_SATURATION = "epp_flow_saturation"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=300, help="length of the run (default 300)")
    parser.add_argument("--users", type=int, default=100, help="number of users (default 100)")
    parser.add_argument("--servers", type=int, default=2, help="number of model servers (default 2)")
    parser.add_argument(
        "--mode", choices=("Hold", "Direct"), default="Hold", help="flow.mode of the policy (default Hold)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overload-") as name:
        asyncio.run(_overload(Path(name), args))
        print(_shares((Path(name) / "recording").read_bytes()))
    return 0


async def _overload(directory: Path, args: argparse.Namespace) -> None:
    async with running_fleet(
        directory,
        serving=made_up(),
        servers=args.servers,
        rule="least-cost",
        gateway_port=0,
        envoy=Path(sys.executable).with_name("envoy"),
        recording=directory / "recording",
    ) as fleet:
        write_policy(fleet.config, {"flow": {"mode": args.mode, **_FLOW}}, name="overload")

        async def in_use() -> bool:
            async with fleet.session.get(f"{fleet.admin_url}/policy") as response:
                return bool((await response.json())["metadata"]["name"] == "overload")

        await wait_until(in_use, what="the policy is in use", timeout_s=20)
        plan = Plan(
            scenario="overload",
            host=f"http://{fleet.config.envoy.listen}",
            users=args.users,
            spawn_per_s=20,
            time_s=args.seconds,
            processes=1,
            label="overload",
            salt="",
            directory=directory / "load",
            options=["--seed", "1"],
        )
        largest = {_WAITING: 0.0, _SATURATION: 0.0}
        watching = asyncio.create_task(_watch(fleet.session, f"{fleet.admin_url}/metrics", largest))
        record = await asyncio.to_thread(run, plan)
        watching.cancel()
        print("\n".join(_table(plan.directory / "locust_stats.csv")))
        figures = record.figures
        print(
            f"requests sent: {figures.asked}, answered: {figures.answered}, failed by kind: {dict(figures.failures)}"
        )
        print(
            f"most requests that waited at once: {largest[_WAITING]:g}; highest saturation: {largest[_SATURATION]:.1f}"
        )


def _shares(recording: bytes) -> str:
    """Return the share of each tenant. The requests name each tenant by a hash. Requests after the first
    tenant has sent its last request are left out, because not all tenants compete then.
    """
    lines = [decode(line) for line in recording.splitlines()]
    asked = [
        line for line in lines if isinstance(line, RecordedRequest) and line.tenant and not line.priority
    ]
    last: dict[str, float] = {}
    for line in asked:
        last[line.tenant] = max(line.at_unix_s, last.get(line.tenant, 0.0))
    tokens: Counter[str] = Counter()
    for line in asked:
        if line.at_unix_s <= min(last.values()):
            tokens[line.tenant] += line.prompt_tokens - line.matched_tokens
    shares = sorted(tokens.values(), reverse=True)
    if not shares:
        return "no request of priority 0 was routed"
    listed = ", ".join(f"{share:,}" for share in shares)
    return f"prompt tokens of priority 0 by tenant: {listed}; the largest is {shares[0] / shares[-1]:.2f} times the smallest"


async def _watch(session: aiohttp.ClientSession, url: str, largest: dict[str, float]) -> None:
    """Keep the largest value that each of these metrics had."""
    while True:
        async with session.get(url) as response:
            page = await response.text()
        for name, most in largest.items():
            values = [float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{")]
            largest[name] = max(most, sum(values))
        await asyncio.sleep(_LOOK_S)


def _table(stats: Path) -> list[str]:
    with stats.open() as file:
        rows = {(row["Name"], row["Type"]): row for row in csv.DictReader(file)}
    lines = ["| users of | requests | refused or failed | TTFT p50, s | p90 | p99 |", "| --- " * 6 + "|"]
    for name in sorted(name for name, kind in rows if kind == "ANSWER" and name != "Aggregated"):
        answers, first = rows[name, "ANSWER"], rows[name, "TTFT"]
        times = " | ".join(f"{float(first[share]) / 1000:.2f}" for share in ("50%", "90%", "99%"))
        lines.append(f"| {name} | {answers['Request Count']} | {answers['Failure Count']} | {times} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
