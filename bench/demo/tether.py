"""Runs a command that dies with the process that started it, even if that process is killed.

    python -I -S tether.py PARENT_PID COMMAND [ARGUMENT...]

It runs as a file, with only the standard library, so that it costs about 20 ms. The kernel keeps the setting
(Linux's PR_SET_PDEATHSIG) over exec. So the command gets this process's id, and does not have to know of the
setting.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tethered(command: list[str]) -> list[str]:
    """Return `command` in a form that ends when this process ends."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main(argv: list[str]) -> int:
    """Become the command. Exit with 126 if the parent is already gone."""
    parent, command = int(argv[0]), argv[1:]
    # Only Linux has this call. On other systems the demo ends its children itself, unless it gets SIGKILL.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call took effect
        return 126
    os.execvp(command[0], command)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
