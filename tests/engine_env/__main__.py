"""`python -m tests.engine_env build|lock|run`: prepare the environment of the engine, write
requirements/engine.txt, or run a module with its Python: run pytest tests/engine.
"""

from __future__ import annotations

import sys

from tests.engine_env import environment
from tests.harness.build_command import build_and_tell, command_line, sayer

_say = sayer("engine-env")


def build() -> None:
    found = environment.locate()
    build_and_tell(found.folder, ready=found.ready, build=lambda: environment.build(progress=_say), say=_say)


def run(*words: str) -> None:
    environment.become_python("-m", *words)


if __name__ == "__main__":
    sys.exit(command_line("engine-env", __doc__, {"build": build, "lock": environment.lock, "run": run}))
