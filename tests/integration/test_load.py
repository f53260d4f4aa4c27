"""The load tests as a user starts them, against a real gateway whose servers count too."""

import asyncio
import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from bench.demo.counters import ServerCounters, scrape
from bench.demo.fleet import Fleet, running_fleet
from bench.demo.serving import made_up
from bench.load.figures import RunRecord
from tests.harness.envoy import ENVOY
from tests.harness.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
SMALL: Final = ("--prefix-tokens", "200", "--answer-tokens", "12", "--think", "0.05")


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    output: str


async def load(*options: str) -> Ended:
    """Run `python -m bench.load` to its end, in its own process, because locust patches the process in which
    it runs.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.load", *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode())


def rows(directory: Path) -> dict[str, dict[str, str]]:
    """Return locust's statistics by type."""
    with (directory / "locust_stats.csv").open() as file:
        return {row["Type"]: row for row in csv.DictReader(file)}


def record(directory: Path) -> RunRecord:
    found = RunRecord.read(directory / "figures.json")
    found.figures.check_integrity()
    return found


async def grown(fleet: Fleet, before: Sequence[ServerCounters]) -> list[ServerCounters]:
    after = await scrape(fleet.session, fleet.server_urls)
    return [a.since(b) for a, b in zip(after, before, strict=True)]


@pytest.mark.envoy
async def test_each_load_has_its_rows_and_counts_what_the_servers_counted(tmp_path: Path) -> None:
    async with running_fleet(
        tmp_path,
        serving=made_up(),
        servers=2,
        rule="least-cost",
        gateway_port=0,
        envoy=ENVOY,
    ) as fleet:
        await one_load_counts_what_the_servers_counted(fleet, tmp_path / "conversation")
        await two_processes_share_the_adapters_load(fleet, tmp_path / "lora")


async def one_load_counts_what_the_servers_counted(fleet: Fleet, out: Path) -> None:
    before = await scrape(fleet.session, fleet.server_urls)
    options = ["--host", fleet.envoy.url, "--out", str(out), "--users", "6", "--requests", "30", *SMALL]
    ended = await load("conversation", *options)
    assert ended.status == 0, ended.output
    assert re.search(r"answered +30\n", ended.output)

    counted = rows(out)
    kinds = {"ANSWER", "TTFT", "INTER-TOKEN", "LONGEST-GAP", "TOKENS/S"}
    assert kinds <= counted.keys()
    assert {counted[kind]["Name"] for kind in kinds} == {"conversation"}
    assert {counted[kind]["Request Count"] for kind in (*kinds, "")} == {"30"}, (
        "the totals count answers, once"
    )
    figures = record(out).figures
    servers = await grown(fleet, before)
    assert sum(server.finished for server in servers) == 30 == figures.answered
    assert sum(server.queried_tokens for server in servers) == figures.prompt_tokens
    assert sum(server.hit_tokens for server in servers) == figures.cached_tokens > 0
    assert figures.output_tokens == 30 * 12
    assert figures.uncounted == 0
    verdict = re.search(r"The generator kept up|THE GENERATOR WAS A BOTTLENECK", ended.output)
    assert verdict is not None
    page = (out / "locust.html").read_text()
    assert page.rindex(verdict.group()) < page.index('id="root"'), "on the page, not in one of its scripts"


async def two_processes_share_the_adapters_load(fleet: Fleet, out: Path) -> None:
    before = await scrape(fleet.session, fleet.server_urls)
    options = ["--host", fleet.envoy.url, "--out", str(out), "--users", "4", "--requests", "12", *SMALL]
    ended = await load("lora", *options, "--processes", "2")
    assert ended.status == 0, ended.output
    figures = record(out).figures
    assert figures.answered == 12 == sum(server.finished for server in await grown(fleet, before))
    assert rows(out)["TTFT"]["Request Count"] == "12"


async def test_a_load_that_cannot_run_ends_with_advice() -> None:
    ended = await load("--think", "2", "chat", "--host", f"http://127.0.0.1:{free_port()}")
    assert ended.status == 3
    assert "make run" in ended.output
    assert "Traceback" not in ended.output
