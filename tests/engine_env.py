"""A cached Python with torch and transformers for the engine, with the packages that `prefix-gateway[engine]`
installs and those that run tests/engine. Torch comes without its CUDA packages.

`make engine-env` prepares it. `tests/engine` and `make run MODEL=...` run in it. Users install
`prefix-gateway[engine]` in the usual way.
"""

import os
from typing import NoReturn

from tests.harness.cached_builds import Progress, lock_requirements, say
from tests.vllm_env.environment import LOCK_OVERRIDES, REQUIREMENTS, PythonEnvironment

LOCK_FILE = REQUIREMENTS / "engine.txt"

_VARIABLES = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""The second setting keeps oneDNN from AMX. Some virtual machines announce AMX and then refuse it, and
bfloat16 ends the process there.
"""
_SMOKE_TEST = (
    "import torch, transformers, gguf; (torch.ones(8, 8) @ torch.ones(8, 8)).sum();"
    "print('torch', torch.__version__, 'and transformers', transformers.__version__, 'work')"
)


def locate() -> PythonEnvironment:
    return PythonEnvironment.of("engine", LOCK_FILE)


def require() -> PythonEnvironment:
    return locate().required("the engine environment is", command="make engine-env")


def build(*, progress: Progress = say) -> None:
    locate().installed("engine", LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)


def become_module(*words: str) -> NoReturn:
    """Let this process continue as a module in the environment's Python, with one thread for torch. Several
    threads would wait for each other.
    """
    python = require().python
    os.execve(python, [str(python), "-m", *words], {**_VARIABLES, **os.environ})


def lock() -> None:
    """Write requirements/engine.txt anew."""
    wanted = ("--extra", "engine", "--extra", "kv-events", "--group", "engine-test")
    lock_requirements(
        LOCK_FILE, *wanted, "--override", LOCK_OVERRIDES, REQUIREMENTS.parent / "pyproject.toml"
    )
