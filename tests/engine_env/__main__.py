"""`python -m tests.engine_env build|run|lock`: prepare the environment of the engine, or run its Python."""

from __future__ import annotations

import argparse
import sys

from tests.engine_env import environment
from tests.harness.build_command import build_and_tell, exit_status, sayer

_say = sayer("engine-env")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the cached environment unless it exists")
    run = commands.add_parser(
        "run", help="run a module with the Python of the environment: run pytest tests/engine"
    )
    run.add_argument("module")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("lock", help="write requirements/engine.txt from pyproject.toml")
    args = parser.parse_args()
    chosen = {
        "build": build,
        "lock": environment.lock,
        "run": lambda: environment.become_python("-m", args.module, *args.arguments),
    }[args.command]
    return exit_status("engine-env", chosen)


def build() -> None:
    found = environment.locate()
    build_and_tell(found.folder, ready=found.ready, build=lambda: environment.build(progress=_say), say=_say)


if __name__ == "__main__":
    sys.exit(main())
