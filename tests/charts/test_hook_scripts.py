"""The Python scripts that the charts put into pods, each run as a process: vLLM's preStop hook, and the
gateway's `helm test`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.charts.rendering import GATEWAY, MODEL_SERVER
from tests.harness.backend import running_backend
from tests.harness.listening import accepting
from tests.harness.ports import free_port
from tests.harness.processes import managed_process, wait_until

pytestmark = pytest.mark.processes
DRAIN = MODEL_SERVER / "files" / "drain.py"
SMOKE = GATEWAY / "files" / "smoke.py"
FOREVER = "100000"


@pytest.mark.parametrize("metric", ["vllm:num_requests_running", "vllm:num_requests_waiting"])
async def test_the_hook_waits_until_nothing_runs_and_nothing_waits(tmp_path: Path, metric: str) -> None:
    async with running_backend("vllm") as server:
        server.metrics[metric] = 2.0
        command: list[str | Path] = [sys.executable, "-I", DRAIN, str(server.address.port), "0", FOREVER]
        async with managed_process("hook", command, directory=tmp_path) as hook:
            await wait_until(lambda: len(server.received) > 3, what="the hook asks again and again")
            assert hook.status is None
            server.metrics[metric] = 0.0
            assert await hook.wait() == 0


async def test_the_hook_of_a_worker_waits_for_its_leader_and_goes_with_it(tmp_path: Path) -> None:
    """The server spans several nodes. A worker that ended before its leader would cut the
    leader's answers.
    """
    async with running_backend("vllm") as leader:
        leader.metrics["vllm:num_requests_running"] = 1.0
        command: list[str | Path] = [sys.executable, "-I", DRAIN, str(leader.address.port), "0", FOREVER]
        named = {**os.environ, "DRAIN_HOST": "localhost"}
        async with managed_process("worker", command, directory=tmp_path, env=named) as hook:
            await wait_until(lambda: len(leader.received) > 3, what="the hook asks again and again")
            assert hook.status is None
            leader.metrics["vllm:num_requests_running"] = 0.0
            assert await hook.wait() == 0
    nobody = {**os.environ, "DRAIN_HOST": "leader.nowhere.invalid"}
    async with managed_process("alone", command, directory=tmp_path, env=nobody) as hook:
        assert await hook.wait() == 0


async def test_the_hook_gives_up_after_its_time_and_when_the_server_has_gone(tmp_path: Path) -> None:
    async with running_backend("vllm") as server:
        server.metrics["vllm:num_requests_running"] = 1.0
        command: list[str | Path] = [sys.executable, "-I", DRAIN, str(server.address.port), "0", "1"]
        async with managed_process("late", command, directory=tmp_path) as hook:
            assert await hook.wait() == 0
    command = [sys.executable, "-I", DRAIN, str(free_port()), "0", FOREVER]
    async with managed_process("gone", command, directory=tmp_path) as hook:
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

    async with accepting(answer) as port:
        command: list[str | Path] = [sys.executable, "-I", DRAIN, str(port), "0", FOREVER]
        async with managed_process("hook", command, directory=tmp_path) as hook:
            await wait_until(lambda: asked > 3, what="the hook asks again and again")
            assert hook.status is None
            idle = True
            assert await hook.wait() == 0


async def test_helm_test_asks_for_models_and_a_completion(tmp_path: Path) -> None:
    async with running_backend("server") as server:
        environment = {"GATEWAY_URL": f"http://{server.address}", "MODEL": "demo"}
        async with managed_process(
            "smoke", [sys.executable, SMOKE], directory=tmp_path, env=environment
        ) as smoke:
            assert await smoke.wait() == 0
        assert [request.path for request in server.prompts] == ["/v1/models", "/v1/completions"]
        assert b'"demo"' in server.prompts[1].body


async def test_helm_test_fails_with_the_answer_of_the_gateway(tmp_path: Path) -> None:
    async with running_backend("server") as server:
        server.behaviour.fail_next = 1000
        environment = {"GATEWAY_URL": f"http://{server.address}", "MODEL": "", "PATIENCE_S": "0"}
        async with managed_process(
            "smoke", [sys.executable, SMOKE], directory=tmp_path, env=environment
        ) as smoke:
            assert await smoke.wait() == 1
            assert "/v1/models answered 503" in smoke.tail()
