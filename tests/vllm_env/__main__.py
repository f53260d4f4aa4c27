"""`python -m tests.vllm_env build|lock|record`: prepare the real vLLM of the tests, or what was recorded from it."""

from __future__ import annotations

import argparse
import sys
import time

from tests.harness.cached_builds import BuildFailedError, folder_bytes
from tests.vllm_env import environment, recording


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "build", help="build the cached environment and the tiny model; at once if they are there"
    )
    commands.add_parser("lock", help="write requirements/vllm.txt from vllm.in and vllm-overrides.txt")
    commands.add_parser("record", help="start a vLLM and write tests/contract/data anew from what it says")
    command: str = parser.parse_args().command
    try:
        if command == "build":
            build()
        elif command == "lock":
            environment.lock()
        else:
            recording.record_all(environment.require(), progress=_say)
    except BuildFailedError as error:
        print(f"vllm-env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-env: interrupted; nothing half-made is left under a final name", file=sys.stderr)
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
    for other in environment.others():
        _say(f"of other pins, and safe to remove unless another checkout uses it: {other}")


def _say(line: str) -> None:
    print(f"vllm-env: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
