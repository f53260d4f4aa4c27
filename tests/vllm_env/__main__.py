"""`python -m tests.vllm_env build|lock|record`: prepare the tests' real vLLM and its tiny model, write
requirements/vllm.txt, or write the messages of a vLLM to tests/contract/data.
"""

from __future__ import annotations

import sys

from tests.harness.build_command import build_and_tell, command_line, sayer
from tests.vllm_env import environment, recording

_say = sayer("vllm-env")


def build() -> None:
    found = environment.locate()
    build_and_tell(found.folder, ready=found.ready, build=lambda: environment.build(progress=_say), say=_say)


def record() -> None:
    recording.record_all(environment.require(), progress=_say)


if __name__ == "__main__":
    sys.exit(command_line("vllm-env", __doc__, {"build": build, "lock": environment.lock, "record": record}))
