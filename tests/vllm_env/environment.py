"""Owns the cached vLLM environment: a virtual environment with vLLM for the CPU, and the tiny model beside
it, each in a folder of the cache (`tests.harness.cached_builds`). `tests.engine_env` makes its environment
here too. Called by the command line, the server launcher and the fixtures.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.harness.cached_builds import (
    UV,
    BuildFailedError,
    CachedBuild,
    Progress,
    cache_folder,
    content_key,
    lock_requirements,
    run,
    say,
)
from tests.vllm_env import cuda_standins, tiny_model

REQUIRED = "PREFIX_GATEWAY_REQUIRE_VLLM"
"""With this variable, a test that needs vLLM fails if vLLM is missing."""
BUILD_COMMAND = "make vllm-env"
REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCK_FILE = REQUIREMENTS / "vllm.txt"
LOCK_OVERRIDES = REQUIREMENTS / "vllm-overrides.txt"

_RECIPE = b"1"
"""Raise this number when a change to `install` changes the files that it writes."""
_SMOKE_TEST = (
    "import logging; logging.disable(); import torch, vllm; assert not torch.cuda.is_available(); (torch.ones(8, 8) @ torch.ones(8, 8)).sum();"
    "print('torch', torch.__version__, 'and vllm', vllm.__version__, 'work')"
)


@dataclass(frozen=True, slots=True)
class PythonEnvironment(CachedBuild):
    """A virtual environment with the packages of a lock file, and torch without CUDA."""

    @classmethod
    def of(cls, kind: str, lock_file: Path) -> PythonEnvironment:
        """Return the place of the environment for this checkout and this Python, whether it exists or not."""
        interpreter = f"{platform.machine()} {sys.version} {sys.base_prefix}"
        key = content_key(
            _RECIPE, interpreter.encode(), lock_file.read_bytes(), Path(cuda_standins.__file__).read_bytes()
        )
        return PythonEnvironment(cache_folder() / f"{kind}-{key}")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def installed(self, kind: str, lock_file: Path, *, smoke_test: str, progress: Progress) -> None:
        """Install the packages if the environment is missing, and check that they work."""

        def fill(folder: Path) -> None:
            check_machine()
            progress(f"installing the packages of {lock_file.name} for the CPU: minutes on a slow line")
            install(folder, lock_file, smoke_test=smoke_test, progress=progress)

        self.build(kind, fill, progress=progress)


@dataclass(frozen=True, slots=True)
class VllmEnvironment(PythonEnvironment):
    model_folder: Path
    """Holds `tiny_model.MODEL` and each of `tiny_model.ADAPTERS`."""

    @property
    def ready(self) -> bool:
        return self.folder.is_dir() and self.model_folder.is_dir()


def locate() -> VllmEnvironment:
    folder = PythonEnvironment.of("vllm", LOCK_FILE).folder
    environment_key = folder.name.removeprefix("vllm-")
    model_key = content_key(environment_key.encode(), Path(tiny_model.__file__).read_bytes())
    return VllmEnvironment(folder, model_folder=cache_folder() / f"tiny-model-{model_key}")


def require() -> VllmEnvironment:
    return locate().required("the vLLM environment is", command=BUILD_COMMAND)


def build(*, progress: Progress = say) -> None:
    """Build the missing parts of the environment, and tell `progress` each step."""
    environment = locate()

    def fill_model(folder: Path) -> None:
        progress("writing the tiny model and its LoRA adapters")
        run(environment.python, tiny_model.__file__, folder)

    environment.installed("vllm", LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)
    CachedBuild(environment.model_folder).build("tiny-model", fill_model, progress=progress)


def lock() -> None:
    """Write requirements/vllm.txt anew."""
    lock_requirements(LOCK_FILE, "--override", LOCK_OVERRIDES, LOCK_FILE.with_suffix(".in"))


def install(folder: Path, lock_file: Path, *, smoke_test: str, progress: Progress) -> None:
    """Make a virtual environment in `folder` with the packages of `lock_file` and its torch without CUDA, and
    check that it works.
    """
    python = folder / "bin" / "python"
    run(*UV, "venv", "--quiet", "--relocatable", "--python", sys.executable, folder)
    # Compile the bytecode now: otherwise each server that starts first compiles 20,000 files.
    options = ("--compile-bytecode", "--no-deps", "--require-hashes")
    run(*UV, "pip", "install", *options, "--python", python, "-r", lock_file)
    progress("compiling stand-ins for the CUDA libraries that torch links to")
    standins = cuda_standins.build(_site_packages(python))
    progress(f"compiled {len(standins)}; checking the installation")
    run(python, "-W", "ignore", "-c", smoke_test)


def check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildFailedError("requirements/vllm.txt is pinned for Linux on x86_64")
    missing = [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]
    if missing:
        raise BuildFailedError(f"{' and '.join(missing)} not found; on Debian: apt-get install gcc binutils")


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )
