"""The script that keeps the picker running in Envoy's pod, run as a process. The tests check what ends the
picker, and how the script's probe answers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.charts.rendering import GATEWAY
from tests.harness.gateway import config_in, running_picker, write_endpoints
from tests.harness.listening import accepting
from tests.harness.ports import free_port
from tests.harness.processes import managed_process, wait_until

pytestmark = pytest.mark.processes
KEEP = GATEWAY / "files" / "keep.sh"
PATIENCE_S = 120.0


def run(script: str) -> list[str | Path]:
    return ["bash", KEEP, "run", "bash", "-c", script]


async def test_a_picker_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = f"echo x >> {runs}; n=$(wc -l < {runs}); [[ $n -lt 3 ]] && exit $((n + 2)); sleep 1000"
    async with managed_process("keep", run(script), directory=tmp_path) as keep:
        await wait_until(
            lambda: runs.exists() and runs.read_text().count("x") == 3,
            what="the third run",
            timeout_s=PATIENCE_S,
        )
        assert keep.status is None
    said = (tmp_path / "keep.err").read_text().splitlines()
    assert said == [
        "keep.sh: the picker ended with status 3; it is started again in 1 s",
        "keep.sh: the picker ended with status 4; it is started again in 2 s",
    ]


async def test_configuration_that_cannot_be_used_ends_keeper_only_in_first_run(
    tmp_path: Path,
) -> None:
    async with managed_process("first", run("exit 2"), directory=tmp_path) as keep:
        assert await keep.wait() == 2
    runs = tmp_path / "runs"
    script = f"echo x >> {runs}; [[ $(wc -l < {runs}) -eq 1 ]] && exit 1; exit 2"
    async with managed_process("later", run(script), directory=tmp_path) as keep:
        await wait_until(
            lambda: runs.exists() and runs.read_text().count("x") == 3,
            what="the third run",
            timeout_s=PATIENCE_S,
        )
        assert keep.status is None


async def test_the_keeper_passes_a_signal_to_end_on_and_waits(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'sleep 0.2; exit 7' TERM; touch {ready}; while :; do sleep 0.05; done"
    async with managed_process("keep", run(script), directory=tmp_path) as keep:
        await wait_until(ready.exists, what="the picker runs", timeout_s=PATIENCE_S)
        keep.signal(signal.SIGTERM)
        assert await keep.wait() == 7, "as the picker ended"


async def test_a_signal_to_end_between_two_runs_ends_the_keeper(tmp_path: Path) -> None:
    error = tmp_path / "keep.err"
    async with managed_process("keep", run("exit 3"), directory=tmp_path) as keep:
        await wait_until(
            lambda: "again in 2 s" in error.read_text(), what="the keeper waits for 2 s", timeout_s=PATIENCE_S
        )
        keep.signal(signal.SIGTERM)
        assert await keep.wait() == 0


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(text: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /healthz HTTP/1.1\r\n")
        writer.write(text)
        writer.close()

    return answer


async def probe(port: int, directory: Path) -> int:
    command: list[str | Path] = ["bash", KEEP, "alive", "127.0.0.1", str(port)]
    async with managed_process("probe", command, directory=directory) as process:
        return await process.wait()


@pytest.mark.parametrize(
    ("text", "status"),
    [(b"HTTP/1.1 200 OK\r\n\r\nok", 0), (b"HTTP/1.1 503 Bad\r\n\r\n", 1), (b"", 0)],
    ids=["well", "not well", "dies over it"],
)
async def test_the_probe_passes_or_fails_as_the_picker_answers(
    tmp_path: Path, text: bytes, status: int
) -> None:
    async with accepting(saying(text)) as port:
        assert await probe(port, tmp_path) == status


async def test_probe_fails_for_a_picker_that_hangs_and_not_for_one_that_is_away(tmp_path: Path) -> None:
    assert await probe(free_port(), tmp_path) == 0
    over = asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with accepting(hang) as port:
        assert await probe(port, tmp_path) == 1
        over.set()


async def test_the_probe_passes_with_the_real_picker(tmp_path: Path) -> None:
    """The picker answers only for hosts that it knows, so the probe asks for one of these hosts."""
    config = config_in(tmp_path)
    write_endpoints(config, [])
    async with running_picker(config, directory=tmp_path):
        host, port = config.admin.address.rsplit(":", 1)
        probe = await asyncio.create_subprocess_exec(
            "bash", KEEP, "alive", host, port, stderr=asyncio.subprocess.PIPE
        )
        _, said = await probe.communicate()
    assert (probe.returncode, said) == (0, b"")
