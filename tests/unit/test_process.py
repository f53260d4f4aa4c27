from __future__ import annotations

import subprocess
import sys
from ctypes import CDLL

import pytest

_FAULTS_OF_LARGE_BLOCKS = """
import resource, sys
if sys.argv[1] == "tuned":
    from epp import process
    process.tune()
blocks = [bytes(400_000) for _ in range(4)]
del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    blocks = [bytes(400_000) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS_OF_LARGE_BLOCKS, how], capture_output=True, check=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(CDLL(None), "mallopt"), reason="the allocator is not glibc's")
def test_memory_of_large_prompts_is_used_again_instead_of_being_faulted_in_anew() -> None:
    plain, tuned = _faults("plain"), _faults("tuned")
    assert tuned < plain / 10, (plain, tuned)


def test_the_collector_runs_seldom_and_leaves_alone_what_was_there_at_start() -> None:
    script = "import gc; from epp import process; process.tune(); print(gc.get_freeze_count(), *gc.get_threshold())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    frozen, youngest, *_ = map(int, done.stdout.split())
    assert frozen > 1_000
    assert youngest > 700
