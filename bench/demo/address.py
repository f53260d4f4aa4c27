"""Writes and finds the address of a running demo: a file in the checkout, which exists as long as the demo
runs. `make load` reads it.

There is one file for each demo, named by its process. A killed demo leaves its file, which is then ignored.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).resolve().parents[2] / "out" / "demo"


@dataclass(frozen=True, slots=True)
class Place:
    """The address of one demo."""

    pid: int
    gateway: str


@contextmanager
def announced(gateway: str, *, directory: Path = DIRECTORY) -> Iterator[None]:
    """Announce this process's gateway, so that other programs can find it until the block ends. In a checkout
    that is not writable, they cannot find it.
    """
    file = directory / f"{os.getpid()}.address"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(gateway)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def running(*, directory: Path = DIRECTORY) -> list[Place]:
    """Return all running demos of this checkout, the latest first."""
    files = sorted(directory.glob("*.address"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [Place(int(file.stem), file.read_text()) for file in files if _alive(int(file.stem))]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
