"""Runs the processes of the engines. They start in their own environments with one thread each, work in
turns, and end with this process.

A side is an engine with its cache on or off. The command calls this module.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.model_server.peers.work import Round, Turn
from tests.engine_env import environment as engine_environment
from tests.harness.cached_builds import cache_folder
from tests.vllm_env import environment as vllm_environment


@dataclass(frozen=True, slots=True)
class SideName:
    engine: str
    cache: bool

    def __str__(self) -> str:
        return f"{self.engine} {'with' if self.cache else 'without'}"


class SideError(Exception):
    """An engine did not start, or failed. The message ends with its log."""


class Side:
    def __init__(self, name: SideName, *, model: Path, num_blocks: int, logs: Path) -> None:
        """Start loading the engine. `version` waits for it."""
        self.name = name
        self._log = logs / f"{name}.log"
        command = [str(_python(name.engine)), "-m", f"bench.model_server.peers.side_{name.engine}"]
        command += [str(model), "--num-blocks", str(num_blocks), *(["--cache"] if name.cache else [])]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | _VARIABLES | {"VLLM_CACHE_ROOT": str(cache_folder() / "vllm-scratch")},
            )
        self.version = ""

    def __enter__(self) -> Self:
        self.version = str(self._read()["version"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def turn(self, rounds: Sequence[Round]) -> Turn:
        assert self._process.stdin is not None
        print(json.dumps([asdict(one) for one in rounds]), file=self._process.stdin, flush=True)
        return Turn(**self._read())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise SideError(f"{self.name} has ended:\n{tail}")
        content: dict[str, Any] = json.loads(line)
        return content


_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def _python(engine: str) -> Path:
    if engine == "vllm":
        return vllm_environment.require().python
    return engine_environment.require().python
