"""`python -m tests.vllm_env build|lock|record`: prepare the tests' real vLLM, or record its messages."""

from __future__ import annotations

import argparse
import sys

from tests.harness.build_command import build_and_tell, exit_status, sayer
from tests.vllm_env import environment, recording

_say = sayer("vllm-env")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_env", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build the cached environment and the tiny model unless they exist")
    commands.add_parser("lock", help="write requirements/vllm.txt from vllm.in and vllm-overrides.txt")
    commands.add_parser("record", help="start a vLLM and write its messages to tests/contract/data")
    command: str = parser.parse_args().command
    chosen = {"build": build, "lock": environment.lock, "record": record}[command]
    return exit_status("vllm-env", chosen)


def build() -> None:
    found = environment.locate()
    build_and_tell(found.folder, ready=found.ready, build=lambda: environment.build(progress=_say), say=_say)
    for other in environment.others():
        _say(f"of other pins, and safe to remove unless another checkout uses it: {other}")


def record() -> None:
    recording.record_all(environment.require(), progress=_say)


if __name__ == "__main__":
    sys.exit(main())
