"""Writes and finds the address of a running demo: a file in the checkout, which exists as long as the demo
runs. `make load` reads it.

There is one file for each demo, named by its process. A killed demo leaves its file, which is then ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).resolve().parents[2] / "out" / "demo"


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of one demo."""

    pid: int
    gateway: str
    admin: str
    """The picker's admin address."""
    policy_file: str
    servers: Sequence[str]


@contextmanager
def announced(place: Place, *, directory: Path = DIRECTORY) -> Iterator[None]:
    """Announce `place`, so that other programs can find it until the block ends. In a checkout that is not
    writable, they cannot find it.
    """
    file = directory / f"{place.pid}.json"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(place)))
        fresh.rename(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def running(*, directory: Path = DIRECTORY) -> list[Place]:
    """Return all running demos of this checkout, the latest first."""
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [place for file in files if (place := _read(file)) is not None]


def _read(file: Path) -> Place | None:
    """Return the addresses in a file, or None if the demo has ended."""
    try:
        place = Place(**json.loads(file.read_text()))
        os.kill(place.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return place
