"""Owns the cached vLLM environment: a virtual environment with vLLM for the CPU, and the tiny model beside
it.

Each has a folder in the user's cache. The folder is named after a hash of everything that decides its
content. So a changed pin makes a new folder, and checkouts with equal pins share one. Invariants: a folder
under its final name is complete (built elsewhere, checked, renamed), and one process builds at a time (a file
lock). The command line, the server launcher and the fixtures call this module.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.harness.cached_builds import BuildFailedError, CachedBuild, cache_folder, content_key, run
from tests.vllm_env import cuda_standins, tiny_model

REQUIRED = "PREFIX_GATEWAY_REQUIRE_VLLM"
"""With this variable, a test that needs vLLM fails if vLLM is missing."""
BUILD_COMMAND = "python -m tests.vllm_env build"
REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCK_FILE = REQUIREMENTS / "vllm.txt"
LOCK_INPUT = REQUIREMENTS / "vllm.in"
LOCK_OVERRIDES = REQUIREMENTS / "vllm-overrides.txt"

_RECIPE = b"1"
"""Raise this number when a change to `install` changes the files that it writes."""
_SMOKE_TEST = (
    "import logging; logging.disable(); import torch, vllm; assert not torch.cuda.is_available(); (torch.ones(8, 8) @ torch.ones(8, 8)).sum();"
    "print('torch', torch.__version__, 'and vllm', vllm.__version__, 'work')"
)


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """The place of a complete environment."""

    folder: Path
    model_folder: Path
    """Holds `tiny_model.MODEL` and each of `tiny_model.ADAPTERS`."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        return self.folder.is_dir() and self.model_folder.is_dir()


def locate() -> VllmEnvironment:
    """Return the place of the environment for this checkout and this Python, whether it exists or not."""
    interpreter = f"{platform.machine()} {sys.version} {sys.base_prefix}"
    environment_key = content_key(
        _RECIPE, interpreter.encode(), LOCK_FILE.read_bytes(), _code_of(cuda_standins.__file__)
    )
    model_key = content_key(environment_key.encode(), _code_of(tiny_model.__file__))
    return VllmEnvironment(
        folder=cache_folder() / f"vllm-{environment_key}",
        model_folder=cache_folder() / f"tiny-model-{model_key}",
    )


def require() -> VllmEnvironment:
    environment = locate()
    if not environment.ready:
        raise BuildFailedError(f"the vLLM environment is not built; build it with `{BUILD_COMMAND}`")
    return environment


def build(*, progress: Callable[[str], None]) -> VllmEnvironment:
    """Build the missing parts of the environment, and tell `progress` each step."""
    environment = locate()

    def fill(folder: Path) -> None:
        check_machine()
        progress("installing vLLM for the CPU: about 1 GB to download, some minutes on a slow line")
        install(folder, LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)

    def fill_model(folder: Path) -> None:
        progress("writing the tiny model and its LoRA adapters")
        run(environment.python, tiny_model.__file__, folder)

    CachedBuild(environment.folder).build("vllm", fill, progress=progress)
    CachedBuild(environment.model_folder).build("tiny-model", fill_model, progress=progress)
    return environment


def lock() -> None:
    """Write requirements/vllm.txt anew."""
    options = ("--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate")
    target = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    files = ("--override", LOCK_OVERRIDES, LOCK_INPUT, "--output-file", LOCK_FILE)
    run(*uv(), "pip", "compile", *options, *target, *files)


def install(folder: Path, lock_file: Path, *, smoke_test: str, progress: Callable[[str], None]) -> None:
    """Make a virtual environment in `folder` with the packages of `lock_file` and its torch without CUDA, and
    check that it works.
    """
    python = folder / "bin" / "python"
    run(*uv(), "venv", "--quiet", "--relocatable", "--python", sys.executable, folder)
    # Compile the bytecode now: otherwise each server that starts first compiles 20,000 files.
    options = ("--compile-bytecode", "--no-deps", "--require-hashes")
    run(*uv(), "pip", "install", *options, "--python", python, "-r", lock_file)
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


def uv() -> tuple[str | Path, ...]:
    """Return uv from this interpreter's environment, else from PATH."""
    if importlib.util.find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    if found := shutil.which("uv"):
        return (found,)
    raise BuildFailedError("uv not found; it is among the packages of requirements/dev.txt")


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def _code_of(module_file: str | None) -> bytes:
    assert module_file is not None
    return Path(module_file).read_bytes()
