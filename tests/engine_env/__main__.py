"""`python -m tests.engine_env build|run|lock`: prepare the environment of the engine, or run its Python."""

from __future__ import annotations

import argparse
import sys
import time

from tests.engine_env import environment
from tests.harness.cached_builds import BuildFailedError, folder_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the cached environment; at once if it is there")
    run = commands.add_parser("run", help="run a module with its Python: run pytest tests/engine")
    run.add_argument("module")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("lock", help="write requirements/engine.txt from pyproject.toml")
    args = parser.parse_args()
    command: str = args.command
    try:
        if command == "build":
            build()
        elif command == "run":
            environment.become_python("-m", args.module, *args.arguments)
        else:
            environment.lock()
    except BuildFailedError as error:
        print(f"engine-env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine-env: interrupted; nothing half-made is left under a final name", file=sys.stderr)
        return 130
    return 0


def build() -> None:
    started_at = time.monotonic()
    found = environment.locate().ready
    built = environment.build(progress=_say)
    if found:
        _say(f"ready at {built.folder}")
    else:
        gigabytes = folder_bytes(built.folder) / 1e9
        _say(f"ready at {built.folder}: {gigabytes:.1f} GB, {time.monotonic() - started_at:.0f} s")


def _say(line: str) -> None:
    print(f"engine-env: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
