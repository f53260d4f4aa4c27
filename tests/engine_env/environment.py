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

from tests.harness.cached_builds import (
    built_elsewhere,
    cache_folder,
    content_key,
    only_builder,
    remove_unfinished,
    run,
)
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
class EngineEnvironment:
    """The paths of a complete environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        return self.folder.is_dir()


def locate() -> EngineEnvironment:
    """Return the place of the environment for this checkout and this Python, whether it exists or not."""
    interpreter = f"{platform.machine()} {sys.version} {sys.base_prefix}"
    standins = Path(cuda_standins.__file__).read_bytes()
    name = content_key(_RECIPE, interpreter.encode(), LOCK_FILE.read_bytes(), standins)
    return EngineEnvironment(cache_folder() / f"engine-{name}")


def build(*, progress: Callable[[str], None]) -> EngineEnvironment:
    """Build the environment if it is missing, and tell `progress` each step."""
    environment = locate()
    if environment.ready:
        return environment
    with only_builder("engine", progress=progress):
        remove_unfinished(("engine",), progress=progress)
        if not environment.ready:
            shared.check_machine()
            progress("installing torch and transformers for the CPU: about 600 MB to download")
            with built_elsewhere(environment.folder) as folder:
                shared.install(folder, LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)
    return environment


def require() -> EngineEnvironment:
    """Return the complete environment. Raise VllmEnvironmentError if it has not been built."""
    environment = locate()
    if not environment.ready:
        raise shared.VllmEnvironmentError(
            f"the engine environment is not built; build it with `{BUILD_COMMAND}`"
        )
    return environment


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
