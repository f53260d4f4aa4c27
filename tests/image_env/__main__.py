"""`python -m tests.image_env build|lock`: build the images of deploy/docker into the cache, and print their
sizes.
"""

from __future__ import annotations

import sys
import time

from tests.harness.build_command import command_line, sayer
from tests.image_env import environment

_say = sayer("image-env")


def build() -> None:
    started_at = time.monotonic()
    for name, image in environment.build(progress=_say).items():
        own, base = image.own_bytes / 1e6, image.base_bytes / 1e6
        packages = len(image.materials("python")["components"]), len(image.materials("debian")["components"])
        _say(
            f"{name}: {own:.0f} MB on a base of {base:.0f} MB; {packages[0]} Python packages, {packages[1]} of Debian"
        )
    _say(f"ready after {time.monotonic() - started_at:.0f} s")


if __name__ == "__main__":
    sys.exit(command_line("image-env", __doc__, {"build": build, "lock": environment.lock}))
