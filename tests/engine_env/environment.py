"""Owns the cached engine environment: the pinned packages of the extra `engine`, and the packages that run
tests/engine.

The builder of the vLLM environment does the work, with the same rules. The folder is named after a hash of
everything that decides its content, a folder under its final name is complete, and one process builds at a
time. Torch comes without its CUDA packages. The environment is for tests and for `make run` on machines
without a GPU. On other machines users install `prefix-gateway[engine]` in the usual way.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.harness.cached_builds import CachedBuild, cache_folder, content_key, run
from tests.vllm_env import cuda_standins
from tests.vllm_env import environment as shared

BUILD_COMMAND = "python -m tests.engine_env build"
LOCK_FILE = shared.REQUIREMENTS / "engine.txt"
_PYPROJECT = shared.REQUIREMENTS.parent / "pyproject.toml"

_VARIABLES = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""The second setting keeps oneDNN from AMX. Some virtual machines announce AMX and then refuse it, and
bfloat16 ends the process there.
"""
_RECIPE = b"1"
"""Raise this number when a change to `build` changes the files that it writes."""
_SMOKE_TEST = (
    "import torch, transformers, gguf; (torch.ones(8, 8) @ torch.ones(8, 8)).sum();"
    "print('torch', torch.__version__, 'and transformers', transformers.__version__, 'work')"
)


@dataclass(frozen=True, slots=True)
class EngineEnvironment(CachedBuild):
    """The paths of a complete environment."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def locate() -> EngineEnvironment:
    """Return the place of the environment for this checkout and this Python, whether it exists or not."""
    interpreter = f"{platform.machine()} {sys.version} {sys.base_prefix}"
    standins = Path(cuda_standins.__file__).read_bytes()
    name = content_key(_RECIPE, interpreter.encode(), LOCK_FILE.read_bytes(), standins)
    return EngineEnvironment(cache_folder() / f"engine-{name}")


def build(*, progress: Callable[[str], None]) -> EngineEnvironment:
    """Build the environment if it is missing, and tell `progress` each step."""

    def fill(folder: Path) -> None:
        shared.check_machine()
        progress("installing torch and transformers for the CPU: about 600 MB to download")
        shared.install(folder, LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)

    return locate().build("engine", fill, progress=progress)


def require() -> EngineEnvironment:
    return locate().required("the engine environment is", command=BUILD_COMMAND)


def become_python(*arguments: str) -> NoReturn:
    """Let this process continue as the environment's Python, with one thread for torch. Several threads would
    wait for each other.
    """
    python = require().python
    os.execve(python, [str(python), *arguments], {**_VARIABLES, **os.environ})


def lock() -> None:
    """Write requirements/engine.txt anew."""
    options = ("--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate")
    target = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    wanted = ("--extra", "engine", "--extra", "kv-events", "--group", "engine-test")
    files = ("--override", shared.LOCK_OVERRIDES, _PYPROJECT, "--output-file", LOCK_FILE)
    run(*shared.uv(), "pip", "compile", *options, *target, *wanted, *files)
