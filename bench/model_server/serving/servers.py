"""Runs the two servers as processes, with the same model folder and cache size, in float32 and with one
thread.

The command calls this module.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vllm_env import environment as vllm_environment
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME, ServerOptions, VllmServer

ENGINES = ("ours", "vllm")
_START_S = 600.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pids: Sequence[int]
    """The ids of all processes of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    folder: Path
    cache: bool
    num_blocks: int
    max_len_tokens: int
    batch_tokens: int = 2048
    max_requests: int = 64

    @property
    def limits(self) -> list[str]:
        """Return the flags that both servers know."""
        return [
            *("--max-num-seqs", str(self.max_requests)),
            *("--max-num-batched-tokens", str(self.batch_tokens)),
        ]


@contextlib.contextmanager
def running(engine: str, plan: ServerPlan, *, log: Path) -> Iterator[RunningServer]:
    """Run a server, and yield it once it answers. If it does not start, raise RuntimeError or VllmServerError
    with the end of its log.
    """
    with _ours(plan, log) if engine == "ours" else _vllm(plan, log) as server:
        yield server


@contextlib.contextmanager
def _vllm(plan: ServerPlan, log: Path) -> Iterator[RunningServer]:
    cache = "--enable-prefix-caching" if plan.cache else "--no-enable-prefix-caching"
    options = ServerOptions(
        model=plan.folder,
        cache_blocks=plan.num_blocks,
        prompt_limit_tokens=plan.max_len_tokens,
        arguments=(*plan.limits, cache),
        variables={"VLLM_CPU_KVCACHE_SPACE": "4"},
    )
    server = VllmServer(vllm_environment.require(), name=log.stem, folder=log.parent, options=options)
    with server:
        yield RunningServer(f"http://{server.address}", server.pids())


@contextlib.contextmanager
def _ours(plan: ServerPlan, log: Path) -> Iterator[RunningServer]:
    port = _free_port()
    command = [sys.executable, "-m", "model_server", "serve", "--runner", "hf", "--model", str(plan.folder)]
    command += ["--threads", "1", "--dtype", "float32", "--num-blocks", str(plan.num_blocks)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", str(plan.max_len_tokens), *plan.limits]
    command += [] if plan.cache else ["--no-prefix-caching"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield RunningServer(f"http://127.0.0.1:{port}", [process.pid])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


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
