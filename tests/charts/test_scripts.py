"""The scripts that the charts put into pods, each run as a process: vLLM's preStop hook, the gateway's
`helm test`, and the keeper of the picker in Envoy's pod.
"""

import asyncio
import os
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.charts.rendering import GATEWAY, MODEL_SERVER
from tests.harness.backend import running_backend
from tests.harness.listening import accepting
from tests.harness.ports import free_port
from tests.harness.processes import ManagedProcess, managed_process, wait_until

pytestmark = pytest.mark.processes
DRAIN = MODEL_SERVER / "files" / "drain.py"
SMOKE = GATEWAY / "files" / "smoke.py"
KEEP = GATEWAY / "files" / "keep.sh"
Running = AbstractAsyncContextManager[ManagedProcess]


def drain(folder: Path, port: int, *, at_most_s: int = 100_000, host: str = "") -> Running:
    """Run the preStop hook. `host` is the leader of a server that spans several nodes."""
    command: list[str | Path] = [sys.executable, "-I", DRAIN, str(port), "0", str(at_most_s)]
    named = {**os.environ, "DRAIN_HOST": host} if host else None
    return managed_process("hook", command, directory=folder, env=named)


@pytest.mark.parametrize("host", ["", "localhost"], ids=["its own server", "its leader"])
@pytest.mark.parametrize("metric", ["vllm:num_requests_running", "vllm:num_requests_waiting"])
async def test_the_hook_waits_until_nothing_runs_and_nothing_waits(
    tmp_path: Path, metric: str, host: str
) -> None:
    """A worker that ended before its leader would cut the leader's answers."""
    async with running_backend("vllm") as server:
        server.metrics[metric] = 2.0
        async with drain(tmp_path, server.address.port, host=host) as hook:
            await wait_until(lambda: len(server.received) > 3, what="the hook asks again and again")
            assert hook.status is None
            server.metrics[metric] = 0.0
            assert await hook.wait() == 0


async def test_the_hook_gives_up_after_its_time_and_when_the_server_has_gone(tmp_path: Path) -> None:
    async with running_backend("vllm") as server:
        server.metrics["vllm:num_requests_running"] = 1.0
        async with drain(tmp_path, server.address.port, at_most_s=1) as hook:
            assert await hook.wait() == 0
    for host in ("", "leader.nowhere.invalid"):
        async with drain(tmp_path, free_port(), host=host) as hook:
            assert await hook.wait() == 0


async def test_the_hook_waits_for_a_server_that_is_too_busy_to_answer(tmp_path: Path) -> None:
    """Until the server is idle, it accepts connections and closes them without an answer, as a server does
    whose /metrics takes too long.
    """
    asked, idle = 0, False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if idle:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nvllm:num_requests_running 0.0\n")
        writer.close()

    async with accepting(answer) as port, drain(tmp_path, port) as hook:
        await wait_until(lambda: asked > 3, what="the hook asks again and again")
        assert hook.status is None
        idle = True
        assert await hook.wait() == 0


def smoke(folder: Path, url: str, **variables: str) -> Running:
    """Run the command of `helm test`."""
    command: list[str | Path] = [sys.executable, SMOKE]
    return managed_process("smoke", command, directory=folder, env={"GATEWAY_URL": url, **variables})


async def test_helm_test_fails_with_the_answer_of_the_gateway(tmp_path: Path) -> None:
    async with running_backend("server") as server:
        server.behaviour.fail_next = 1000
        async with smoke(tmp_path, f"http://{server.address}", MODEL="", PATIENCE_S="0") as asked:
            assert await asked.wait() == 1
            assert "/v1/models answered 503" in asked.tail()


def keeping(folder: Path, script: str) -> Running:
    """Run the keeper of a picker that does this."""
    command: list[str | Path] = ["bash", KEEP, "run", "bash", "-c", script]
    return managed_process("keep", command, directory=folder)


async def third_run(runs: Path) -> None:
    await wait_until(
        lambda: runs.exists() and runs.read_text().count("x") == 3, what="the third run", timeout_s=120
    )


async def test_a_picker_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = f"echo x >> {runs}; n=$(wc -l < {runs}); [[ $n -lt 3 ]] && exit $((n + 2)); sleep 1000"
    async with keeping(tmp_path, script) as keep:
        await third_run(runs)
        assert keep.status is None
    lines = (tmp_path / "keep.err").read_text().splitlines()
    assert lines == [
        "keep.sh: the picker ended with status 3; it is started again in 1 s",
        "keep.sh: the picker ended with status 4; it is started again in 2 s",
    ]


async def test_configuration_that_cannot_be_used_ends_keeper_only_in_first_run(tmp_path: Path) -> None:
    async with keeping(tmp_path, "exit 2") as keep:
        assert await keep.wait() == 2
    runs = tmp_path / "runs"
    script = f"echo x >> {runs}; [[ $(wc -l < {runs}) -eq 1 ]] && exit 1; exit 2"
    async with keeping(tmp_path, script) as keep:
        await third_run(runs)
        assert keep.status is None


async def test_the_keeper_passes_a_signal_to_end_on_and_waits(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'sleep 0.2; exit 7' TERM; touch {ready}; while :; do sleep 0.05; done"
    async with keeping(tmp_path, script) as keep:
        await wait_until(ready.exists, what="the picker runs", timeout_s=120)
        keep.signal(signal.SIGTERM)
        assert await keep.wait() == 7, "as the picker ended"


async def test_a_signal_to_end_between_two_runs_ends_the_keeper(tmp_path: Path) -> None:
    error = tmp_path / "keep.err"
    async with keeping(tmp_path, "exit 3") as keep:
        await wait_until(lambda: "again in 2 s" in error.read_text(), what="the keeper waits", timeout_s=120)
        keep.signal(signal.SIGTERM)
        assert await keep.wait() == 0


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
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /healthz HTTP/1.1\r\n")
        writer.write(text)
        writer.close()

    async with accepting(answer) as port:
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
