"""The load tests as a user starts them, against a real gateway whose servers count too, and against a server
that misbehaves.
"""

from __future__ import annotations

import asyncio
import csv
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from bench.demo.counters import ServerCounters, scrape
from bench.demo.fleet import Fleet, running_fleet
from bench.demo.serving import made_up
from bench.load.figures import RunRecord
from tests.harness.envoy import ENVOY
from tests.harness.listening import stop_listening
from tests.harness.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
SMALL: Final = ("--prefix-tokens", "200", "--answer-tokens", "12", "--think", "0.05")


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    said: str


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
    assert ended.status == 0, ended.said
    assert re.search(r"answered +30\n", ended.said)
    assert re.search(r"The generator kept up|THE GENERATOR WAS A BOTTLENECK", ended.said)

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
    verdict = re.search(r"The generator kept up|THE GENERATOR WAS A BOTTLENECK", ended.said)
    assert verdict is not None
    page = (out / "locust.html").read_text()
    assert page.rindex(verdict.group()) < page.index('id="root"'), "on the page, not in one of its scripts"


async def two_processes_share_the_adapters_load(fleet: Fleet, out: Path) -> None:
    before = await scrape(fleet.session, fleet.server_urls)
    options = ["--host", fleet.envoy.url, "--out", str(out), "--users", "4", "--requests", "12", *SMALL]
    ended = await load("lora", *options, "--processes", "2")
    assert ended.status == 0, ended.said
    figures = record(out).figures
    assert figures.answered == 12 == sum(server.finished for server in await grown(fleet, before))
    assert rows(out)["TTFT"]["Request Count"] == "12"


# -- a server that misbehaves --------------------------------------------------------------------------------

MODELS: Final = json.dumps({"data": [{"id": "m", "parent": None}]}).encode()
TOKEN: Final = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
GOOD: Final = TOKEN + TOKEN + b"data: [DONE]\n\n"


def whole(body: bytes, *, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


CHUNKED: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
"""The answer says that the connection ends. Otherwise the client may send its next request on this
    connection, which is cut.
    """
ANSWERS: Final = (
    whole(GOOD),
    CHUNKED + chunk(GOOD) + b"0\r\n\r\n",
    whole(b"busy", status="503 Service Unavailable"),
    CHUNKED + chunk(TOKEN),  # The connection ends here.
    whole(TOKEN),  # the HTTP answer is whole, but [DONE] is missing
    b"",
    whole(b"data: {nonsense}\n\n" + GOOD),
    b"NOT HTTP AT ALL\r\n\r\n",
    whole(TOKEN + b'data: {"error":{"message":"out of memory"}}\n\n'),
)
EXPECTED: Final = {"status 503": 1, "cut": 3, "malformed": 2, "error event": 1}


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read the head and the body. Return the first line."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    if length:
        await reader.readexactly(int(length.group(1)))
    return head.split(b"\r\n", 1)[0]


@asynccontextmanager
async def serving_bytes(handle: Any) -> AsyncIterator[tuple[str, asyncio.Server]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if (await read_request(reader)).startswith(b"GET"):
                writer.write(whole(MODELS))
            else:
                await handle(writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server
    finally:
        await stop_listening(server)


async def test_every_kind_of_failure_has_its_class_and_fails_the_command(tmp_path: Path) -> None:
    """After the last answer the server stops listening, so the requests after it are refused."""
    answers = iter(ANSWERS)

    async def handle(writer: asyncio.StreamWriter) -> None:
        if writer_is_last():
            server.close()  # The client does not have its answer yet, so it has not sent its next request.
        writer.write(next(answers))

    left = len(ANSWERS)

    def writer_is_last() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    async with serving_bytes(handle) as (url, server):
        ended = await load(
            *("chat", "--host", url, "--users", "1", "--think", "0", "--requests", str(len(ANSWERS) + 2)),
            *("--out", str(tmp_path / "out")),
        )
    assert ended.status == 1, ended.said
    figures = record(tmp_path / "out").figures
    assert figures.failures == {**EXPECTED, "refused": 2}
    assert (figures.answered, figures.unfinished) == (2, 0)
    assert figures.uncounted == 2
    assert "2 answers came without usage" in ended.said
    assert "1 failed by class 'status 503', such as: status 503: busy" in ended.said
    with (tmp_path / "out" / "locust_failures.csv").open() as file:
        classes = {row["Error"]: int(row["Occurrences"]) for row in csv.DictReader(file)}
    assert {name.split("'")[1]: count for name, count in classes.items()} == figures.failures


async def test_a_load_that_cannot_run_ends_with_advice() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    ended = await load("--think", "2", "chat", "--host", nobody)
    assert ended.status == 3
    assert "make run" in ended.said
    assert "Traceback" not in ended.said

    async def handle(writer: asyncio.StreamWriter) -> None:
        writer.write(whole(GOOD))

    async with serving_bytes(handle) as (url, _):
        ended = await load("lora", "--host", url)
        assert (ended.status, "no LoRA adapter" in ended.said) == (3, True), ended.said
        ended = await load("chat", "--host", url, "--model", "other")
        assert (ended.status, "does not serve the model 'other'. It serves m" in ended.said) == (3, True), (
            ended.said
        )
