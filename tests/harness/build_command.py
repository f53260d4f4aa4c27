"""The common part of the commands that prepare cached things: their words, their messages, their summary, and
their exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.harness.cached_builds import BuildFailedError, folder_bytes

Say = Callable[[str], None]


def sayer(name: str) -> Say:
    """Prints a line at once, after the command's name."""
    return lambda line: print(f"{name}: {line}", flush=True)


def command_line(name: str, about: str, commands: Mapping[str, Callable[..., None]]) -> int:
    """Run one of the commands, with the words that follow its name. 1: a build failed; 130: a person stopped
    it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name.replace('-', '_')}", description=about)
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        commands[args.command](*args.arguments)
    except BuildFailedError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing half-made is left under a final name", file=sys.stderr)
        return 130
    return 0


def build_and_tell(folder: Path, *, ready: bool, build: Callable[[], object], say: Say) -> None:
    """Build the content of `folder`. Print its size and how long the build took. ready: the content is
    already there.
    """
    started_at = time.monotonic()
    build()
    if ready:
        say(f"ready at {folder}")
    else:
        say(f"ready at {folder}: {folder_bytes(folder) / 1e6:,.0f} MB, {time.monotonic() - started_at:.0f} s")
