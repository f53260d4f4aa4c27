"""Starts, watches and kills one real vLLM server on the CPU.

A server is a process group of its own and listens on 127.0.0.1. It never outlives the process that started
it, because a guard that reads from a pipe kills the group when the pipe closes. The fixtures and the recorder
call this module.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.harness.ports import free_port
from tests.vllm_env import tiny_model
from tests.vllm_env.environment import VllmEnvironment

MODEL_NAME = "tiny"
BLOCK_TOKENS = 32
"""vLLM's CPU backend refuses blocks of 16."""
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.2


class VllmServerError(Exception):
    """The server did not start, or died. The message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options in which a server differs from the usual server."""

    model: Path | None = None
    """A model folder, served without LoRA. None means the tiny model with its adapters."""
    cache_blocks: int = 2048
    """65,536 tokens of cache: some 30 prompts of 2,000 tokens."""
    prompt_limit_tokens: int = tiny_model.MAX_TOKENS
    """The prompts have to fit into the cache."""
    hash_algorithm: str = "sha256"
    kv_events_socket: Path | None = None
    """The address for KV events: a Unix socket, since vLLM binds a TCP port on every address or not at all.
    Missed events are replayed at a second socket, with `.replay` at the end of its name.
    """
    adapters: tuple[str, ...] = tiny_model.ADAPTERS
    arguments: tuple[str, ...] = ()
    """Further flags. If a flag comes twice, vLLM takes the last one."""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


class VllmServer:
    """One server. `start` returns at once, so that several can start side by side. `wait_ready` waits."""

    def __init__(
        self, environment: VllmEnvironment, *, name: str, folder: Path, options: ServerOptions | None = None
    ) -> None:
        """`folder` receives the log."""
        self.name = name
        self.options = options or ServerOptions()
        self.host = "127.0.0.1"
        self.port = 0
        self.log_path = folder / f"{name}.log"
        self.ready_after_s: float | None = None
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._started_at = 0.0

    @property
    def address(self) -> str:
        """`127.0.0.1:port`."""
        return f"{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *, port: int | None = None) -> None:
        """Start the server. `port`: the port of a restarted server, which keeps its address. None means any
        free port.
        """
        assert not self.running, f"{self.name} is running already"
        self.kill()  # A dead leader may have left processes of its group. This kills them.
        self.port = free_port() if port is None else port
        self.ready_after_s = None
        self._started_at = time.monotonic()
        self._sockets = tempfile.TemporaryDirectory(
            prefix="vllm-", ignore_cleanup_errors=True
        )  # the path of a socket may have only 107 bytes
        own = {
            "VLLM_RPC_BASE_PATH": self._sockets.name
        }  # a killed server leaves the sockets between its processes
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self._environment.model_folder,  # Then every path that the server can report is relative.
                env={**_variables(self._environment), **own, **self.options.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", f"read -r _; kill -s KILL -- -{self._process.pid}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once the server is ready. Raise VllmServerError as `poll_ready` does."""
        while not self.poll_ready(timeout_s=timeout_s):
            time.sleep(POLL_INTERVAL_S)

    def poll_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Tell whether /health answers 200 by now. Raise VllmServerError if the server died or takes too
        long.
        """
        if self._healthy():
            self.ready_after_s = self.ready_after_s or time.monotonic() - self._started_at
            return True
        if not self.running:
            raise VllmServerError(f"vLLM {self.name} ended with {self._exit_status()}\n{self.log_tail()}")
        if time.monotonic() > self._started_at + timeout_s:
            self.kill()
            raise VllmServerError(f"vLLM {self.name} was not ready in {timeout_s:.0f} s\n{self.log_tail()}")
        return False

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server in order. Then kill the processes that have not ended."""
        if self._process is not None and self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every process of the server, as a crash would. Harmless if none runs."""
        if self._process is None or self._guard is None or self._sockets is None:
            return  # The group has ended, and another group may have its number by now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()
        self._guard = None
        self._sockets.cleanup()

    def log_tail(self, *, lines: int = 30) -> str:
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([f"--- the last lines of {self.log_path}:", *text[-lines:]])

    def get(self, path: str) -> Answer:
        return self._request("GET", path)

    def post(self, path: str, body: Mapping[str, object] | bytes) -> Answer:
        return self._request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def counter(self, name: str) -> float:
        """Return the sum over a metric's samples of exactly this name, from the page as it is now."""
        text = self.get("/metrics").body.decode()
        samples = [s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
        if not samples:
            raise KeyError(f"{name} is not among the metrics of vLLM {self.name}")
        return sum(samples)

    def _request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(
                method, path, body, {"content-type": "application/json"} if body is not None else {}
            )
            response = connection.getresponse()
            return Answer(status=response.status, body=response.read())

    def _healthy(self) -> bool:
        try:
            return self.get("/health").status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def _exit_status(self) -> str:
        return "no process" if self._process is None else f"status {self._process.returncode}"

    def _command(self) -> list[str]:
        options = self.options
        command = [str(self._environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--model", str(options.model or tiny_model.MODEL)]
        command += ["--served-model-name", MODEL_NAME, "--seed", "0"]
        command += [
            "--max-model-len",
            str(options.prompt_limit_tokens),
            "--max-num-seqs",
            "32",
            "--enforce-eager",
            # Of bfloat16 vLLM makes AMX instructions wherever a CPU announces them,
            # and some machines then refuse to run them.
            "--dtype",
            "float32",
        ]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(options.cache_blocks)]
        command += ["--prefix-caching-hash-algo", options.hash_algorithm, "--enable-prompt-tokens-details"]
        if options.model is None:
            command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(tiny_model.LORA_RANK)]
        if options.model is None and options.adapters:
            command += ["--lora-modules", *(f"{adapter}={adapter}" for adapter in options.adapters)]
        if options.kv_events_socket is not None:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"ipc://{options.kv_events_socket}",
                "replay_endpoint": f"ipc://{options.kv_events_socket}.replay",
                "topic": "kv-events",
            }
            command += ["--kv-events-config", json.dumps(events)]
        return [*command, *options.arguments]


def start_all(servers: Sequence[VllmServer]) -> None:
    """Start all servers side by side and wait for them. After a failure none is left running."""
    try:
        for server in servers:
            server.start()
        waiting = list(servers)
        while waiting := [server for server in waiting if not server.poll_ready()]:
            time.sleep(POLL_INTERVAL_S)
    except BaseException:
        for server in servers:
            server.kill()
        raise


def _variables(environment: VllmEnvironment) -> dict[str, str]:
    own = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CACHE_ROOT": str(environment.folder.parent / "vllm-scratch"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # None of the caller's Python or vLLM settings reaches the server:
    # PYTHONHASHSEED alone changes every block hash.
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))} | own
