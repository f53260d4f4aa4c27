"""The user's cache folder, which keeps builds that take minutes, outside any checkout.

Each build is in a folder named after a hash of everything that decides its content. So a changed pin makes a
new folder, and checkouts with equal pins share one. Invariants: a folder under its final name is complete
(built elsewhere, checked, renamed), and only one process at a time builds things of one kind (a file lock).
The packages that build call it. `tests.environments` has their commands.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

UNFINISHED: Final = ".building-"
"""Part of the name of a folder that is still being filled."""
UV: Final = (sys.executable, "-m", "uv")
Progress = Callable[[str], None]
"""Takes a line about each step."""


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


class BuildFailedError(Exception):
    """A command of a build failed. The message names it."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefix-gateway"


def content_key(*parts: bytes) -> str:
    """Return a name that depends only on `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def only_builder(kind: str, *, progress: Progress) -> Iterator[None]:
    """Hold the lock of this kind of build. Wait until the lock is free."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f"{kind}.lock").open("w") as file:
        # Installers inherit the lock. If this process is killed,
        # the lock is free only when they have stopped writing.
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def built_elsewhere(final: Path) -> Iterator[Path]:
    """Yield a folder to build in. It is renamed to `final` on success and removed on failure."""
    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}{UNFINISHED}", dir=final.parent))
    folder.chmod(0o755)
    try:
        yield folder
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class CachedBuild:
    """The folder of a build, which is complete if it exists."""

    folder: Path

    @property
    def ready(self) -> bool:
        return self.folder.is_dir()

    def required(self, what: str, *, command: str) -> Self:
        """Raise BuildFailedError, which names the command that builds it, if it has not been built."""
        if not self.ready:
            raise BuildFailedError(f"{what} not built; build with `{command}`")
        return self

    def build(self, kind: str, fill: Callable[[Path], None], *, progress: Progress) -> Self:
        """Let `fill` fill the folder if it is missing. `kind` is the part of its name before the hash."""
        started_at = time.monotonic()
        if not self.folder.is_dir():
            with only_builder(kind, progress=progress):
                remove_unfinished((kind,), progress=progress)
                if not self.folder.is_dir():
                    with built_elsewhere(self.folder) as folder:
                        fill(folder)
                    took_s, size_mb = time.monotonic() - started_at, folder_bytes(self.folder) / 1e6
                    progress(f"ready at {self.folder}: {size_mb:,.0f} MB, {took_s:.0f} s")
        return self


def remove_unfinished(kinds: Sequence[str], *, progress: Progress) -> None:
    """Remove folders that still have a temporary name. The caller holds the lock, so a killed build has left
    them.
    """
    for folder in sorted(found for kind in kinds for found in cache_folder().glob(f"{kind}-*{UNFINISHED}*")):
        progress(f"removing {folder.name}, which an interrupted build left behind")
        shutil.rmtree(folder)


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run one command of a build and show its output. Raise BuildFailedError if the command fails."""
    started_at = time.monotonic()
    # A child closes all files except inheritable ones, and only the lock is inheritable.
    status = subprocess.run(
        [str(part) for part in command],
        check=False,
        close_fds=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    ).returncode
    if status:
        raise BuildFailedError(
            f"{' '.join(map(str, command))} ended with status {status} after {time.monotonic() - started_at:.0f} s"
        )


def lock_requirements(target: Path, *words: str | Path) -> None:
    """Write a requirement file anew, with hashes, for Python 3.11 on Linux and x86-64."""
    options = ("--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate")
    platform = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    run(*UV, "pip", "compile", *options, *platform, *words, "--output-file", target)


def folder_bytes(folder: Path) -> int:
    """Return the disk space of `folder`, even if another cache shares its files."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
