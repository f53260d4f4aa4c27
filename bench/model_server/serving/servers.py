"""The two servers as processes: the same model folder, float32, one thread, the same cache. Caller: the command."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.vllm_env import environment as vllm_environment

MODEL = "served"
ENGINES = ("ours", "vllm")
_START_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    folder: Path
    cache: bool
    num_blocks: int
    block_tokens: int
    max_len_tokens: int
    batch_tokens: int = 2048
    max_requests: int = 64


@contextlib.contextmanager
def running(engine: str, plan: ServerPlan, *, log: Path) -> Iterator[str]:
    """Its URL, once it answers. RuntimeError, with the end of its log: it does not start."""
    port = _free_port()
    command, variables = (_ours if engine == "ours" else _vllm)(plan, port)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _ours(plan: ServerPlan, port: int) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "model_server", "serve", "--runner", "hf", "--model", str(plan.folder)]
    command += ["--threads", "1", "--dtype", "float32", "--num-blocks", str(plan.num_blocks)]
    command += [*_common(plan, port), *([] if plan.cache else ["--no-prefix-caching"])]
    return command, {}


def _vllm(plan: ServerPlan, port: int) -> tuple[list[str], dict[str, str]]:
    python = vllm_environment.require().python
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.folder)]
    command += ["--dtype", "float32", "--enforce-eager", "--seed", "0"]
    command += ["--num-gpu-blocks-override", str(plan.num_blocks), *_common(plan, port)]
    command += ["--enable-prefix-caching" if plan.cache else "--no-enable-prefix-caching"]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return command, variables


def _common(plan: ServerPlan, port: int) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
        *("--block-size", str(plan.block_tokens), "--max-model-len", str(plan.max_len_tokens)),
        *("--max-num-seqs", str(plan.max_requests), "--max-num-batched-tokens", str(plan.batch_tokens)),
    ]


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    by = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health"):
            return
        if process.poll() is not None or time.monotonic() > by:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the server did not start:\n{end}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
