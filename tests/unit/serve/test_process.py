"""The settings of the process: memory, the garbage collector, threads and open files."""

import subprocess
import sys
from ctypes import CDLL

import pytest

_FAULTS_OF_LARGE_BLOCKS = """
import resource, sys
if sys.argv[1] == "tuned":
    from epp.serve import process
    process.tune()
for _ in range(20):
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
def test_memory_of_large_prompts_is_reused() -> None:
    plain, tuned = _faults("plain"), _faults("tuned")
    assert tuned < plain / 3, (plain, tuned)  # kernels that use large folios have fewer faults to save


def test_the_collector_runs_seldom_and_threads_give_way_soon() -> None:
    numbers = "gc.get_freeze_count(), gc.get_threshold()[0], sys.getswitchinterval()"
    script = f"import gc, sys; from epp.serve import process; process.tune(); print({numbers})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    frozen, youngest, switch_s = map(float, done.stdout.split())
    assert frozen > 1_000, "objects from the start are skipped"
    assert youngest > 700
    assert switch_s < sys.getswitchinterval() / 5


def test_the_command_line_does_not_import_grpc_before_it_is_chosen() -> None:
    script = "import sys; from epp.serve import cli; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    script = (
        "import resource as r; from epp.serve import process; _, hard = r.getrlimit(r.RLIMIT_NOFILE); "
        "hard = min(hard, 70_000) if hard != r.RLIM_INFINITY else 70_000; r.setrlimit(r.RLIMIT_NOFILE, (256, hard)); "
        "process.raise_file_limit(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    soft, hard = map(int, done.stdout.split())
    assert soft == min(hard, 65_536) > 256
