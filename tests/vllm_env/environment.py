"""Owns the cached vLLM environment: a virtual environment with vLLM for the CPU, and the tiny model beside it.

Each lives in a folder of the user's cache that is named after a hash of everything that decides its content, so a
changed pin makes a new folder and checkouts with equal pins share one. Invariants: a folder under its final name is
complete (built elsewhere, checked, renamed), and one process builds at a time (a file lock). Called by the command
line, the server launcher and the fixtures.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.vllm_env import cuda_standins, tiny_model

BUILD_COMMAND = "python -m tests.vllm_env build"
REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCK_FILE = REQUIREMENTS / "vllm.txt"
LOCK_INPUT = REQUIREMENTS / "vllm.in"
LOCK_OVERRIDES = REQUIREMENTS / "vllm-overrides.txt"

_RECIPE = b"1"
"""Raise it when `install` comes to leave something else behind."""
_UNFINISHED = ".building-"
_SMOKE_TEST = (
    "import logging; logging.disable(); import torch, vllm; assert not torch.cuda.is_available(); (torch.ones(8, 8) @ torch.ones(8, 8)).sum();"
    "print('torch', torch.__version__, 'and vllm', vllm.__version__, 'work')"
)


class VllmEnvironmentError(Exception):
    """The environment is missing, or cannot be built; the message says what to do."""


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """Where a complete environment is."""

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
    """Where the environment for this checkout and this Python is, or would be."""
    interpreter = f"{platform.machine()} {sys.version} {sys.base_prefix}"
    environment_key = key(
        _RECIPE, interpreter.encode(), LOCK_FILE.read_bytes(), _code_of(cuda_standins.__file__)
    )
    model_key = key(environment_key.encode(), _code_of(tiny_model.__file__))
    return VllmEnvironment(
        folder=cache_folder() / f"vllm-{environment_key}",
        model_folder=cache_folder() / f"tiny-model-{model_key}",
    )


def require() -> VllmEnvironment:
    """The environment, complete. VllmEnvironmentError where it has not been built."""
    environment = locate()
    if not environment.ready:
        raise VllmEnvironmentError(f"the vLLM environment is not built; build it with `{BUILD_COMMAND}`")
    return environment


def build(*, progress: Callable[[str], None]) -> VllmEnvironment:
    """Make what is missing of the environment, telling `progress` each step; at once where nothing is missing."""
    environment = locate()
    if environment.ready:
        return environment
    cache_folder().mkdir(parents=True, exist_ok=True)
    with only_builder(progress):
        remove_unfinished(progress)
        if not environment.folder.is_dir():
            check_machine()
            progress("installing vLLM for the CPU: about 1 GB to download, some minutes on a slow line")
            with built_elsewhere(environment.folder) as folder:
                install(folder, LOCK_FILE, smoke_test=_SMOKE_TEST, progress=progress)
        if not environment.model_folder.is_dir():
            progress("writing the tiny model and its LoRA adapters")
            with built_elsewhere(environment.model_folder) as folder:
                run(environment.python, tiny_model.__file__, folder)
    return environment


def lock() -> None:
    """Write requirements/vllm.txt anew."""
    options = ("--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate")
    target = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    files = ("--override", LOCK_OVERRIDES, LOCK_INPUT, "--output-file", LOCK_FILE)
    run(*uv(), "pip", "compile", *options, *target, *files)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefix-gateway"


def others() -> list[Path]:
    """Environments of other pins or other Pythons in the cache; another checkout may use them."""
    complete = {python.parents[1] for python in cache_folder().glob("vllm-*/bin/python")}
    return sorted(path for path in complete - {locate().folder} if _UNFINISHED not in path.name)


def folder_bytes(folder: Path) -> int:
    """The disk that `folder` takes, whether or not uv's cache shares the files."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def install(folder: Path, lock_file: Path, *, smoke_test: str, progress: Callable[[str], None]) -> None:
    """A virtual environment in `folder` with the packages of `lock_file`, its torch without CUDA, seen to work."""
    python = folder / "bin" / "python"
    run(*uv(), "venv", "--quiet", "--relocatable", "--python", sys.executable, folder)
    # Bytecode now, or each server that starts first compiles 20,000 files.
    options = ("--compile-bytecode", "--no-deps", "--require-hashes")
    run(*uv(), "pip", "install", *options, "--python", python, "-r", lock_file)
    progress("compiling stand-ins for the CUDA libraries that torch links to")
    standins = cuda_standins.build(_site_packages(python))
    progress(f"compiled {len(standins)}; checking what was installed")
    run(python, "-W", "ignore", "-c", smoke_test)


def check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise VllmEnvironmentError("requirements/vllm.txt is pinned for Linux on x86_64")
    missing = [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]
    if missing:
        raise VllmEnvironmentError(
            f"{' and '.join(missing)} not found; on Debian: apt-get install gcc binutils"
        )


@contextlib.contextmanager
def only_builder(progress: Callable[[str], None]) -> Iterator[None]:
    with (cache_folder() / "vllm.lock").open("w") as file:
        # Installers inherit the lock: where this process is killed, it is free once they have stopped writing.
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def built_elsewhere(final: Path) -> Iterator[Path]:
    """A folder to build in, renamed to `final` on success and removed on failure."""
    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}{_UNFINISHED}", dir=final.parent))
    folder.chmod(0o755)
    try:
        yield folder
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_unfinished(progress: Callable[[str], None]) -> None:
    """Called with the lock held: a folder still under a temporary name is the remains of a killed build."""
    for folder in cache_folder().glob(f"*{_UNFINISHED}*"):
        progress(f"removing {folder.name}, which an interrupted build left behind")
        shutil.rmtree(folder)


def uv() -> tuple[str | Path, ...]:
    """uv as this interpreter's environment has it, else as PATH has it."""
    if importlib.util.find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    if found := shutil.which("uv"):
        return (found,)
    raise VllmEnvironmentError("uv not found; it is among the packages of requirements/dev.txt")


def run(*command: str | Path) -> None:
    started_at = time.monotonic()
    # Files are closed in a child unless marked inheritable, which only the lock is.
    status = subprocess.run([str(part) for part in command], check=False, close_fds=False).returncode
    if status:
        raise VllmEnvironmentError(
            f"{' '.join(map(str, command))} ended with status {status} after {time.monotonic() - started_at:.0f} s"
        )


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def _code_of(module_file: str | None) -> bytes:
    assert module_file is not None
    return Path(module_file).read_bytes()


def key(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()[:16]
