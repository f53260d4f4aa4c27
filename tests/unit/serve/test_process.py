"""The settings of the process: memory, the garbage collector, threads and open files."""

from __future__ import annotations

import os
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
def test_memory_of_large_prompts_is_reused_with_less_than_a_third_of_the_page_faults() -> None:
    plain, tuned = _faults("plain"), _faults("tuned")
    assert tuned < plain / 3, (plain, tuned)  # kernels that use large folios have fewer faults to save


def test_the_collector_runs_seldom_and_skips_objects_from_the_start() -> None:
    script = "import gc; from epp.serve import process; process.tune(); print(gc.get_freeze_count(), *gc.get_threshold())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    frozen, youngest, *_ = map(int, done.stdout.split())
    assert frozen > 1_000
    assert youngest > 700


_SWITCHES_OF_A_SERVER = """
import asyncio, os, struct, sys
from pathlib import Path
from epp.serve import process
if sys.argv[1] == "chosen":
    process.choose_grpc()
import grpc

PING = struct.pack(">IBI8x", 8 << 8 | 6, 0, 0)  # length 8, type PING, no flags, stream 0
SETTINGS = struct.pack(">IBI", 4, 0, 0)

def switches():
    counts = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("event_engine"):
            counts += int((task / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
    return counts

async def main():
    server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + SETTINGS)
    before = switches()
    for _ in range(200):
        writer.write(PING)
        await reader.read(1000)
    print(switches() - before)
    writer.close()
    await server.stop(0)

asyncio.run(main())
"""


def _switches(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _SWITCHES_OF_A_SERVER, how],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if k != "GRPC_EXPERIMENTS"},
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are read from /proc")
def test_a_message_is_not_handed_from_thread_to_thread() -> None:
    plain, chosen = _switches("plain"), _switches("chosen")
    assert plain >= 150, "this version of gRPC needs no setting any more"
    assert chosen < plain / 4, (plain, chosen)


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
