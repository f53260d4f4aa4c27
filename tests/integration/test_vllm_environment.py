"""The environment builder and the launcher, without vLLM: what remains when something goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.vllm_env.cuda_standins import SharedObject, Symbol, plan, source, version_script
from tests.vllm_env.environment import VllmEnvironment

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[2]


def pretend_environment(folder: Path, *, script: str) -> VllmEnvironment:
    """Make an environment whose Python is a shell script."""
    pretended = VllmEnvironment(folder=folder / "vllm-0", model_folder=folder / "tiny-model-0")
    pretended.model_folder.mkdir()
    pretended.python.parent.mkdir(parents=True)
    pretended.python.write_text(f"#!/bin/sh\n{script}\n")
    pretended.python.chmod(0o755)
    return pretended


def test_no_process_of_a_server_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The server's two processes hold a pipe open. The pipe ends when both have ended."""
    pretend_environment(tmp_path, script="sleep 1000 & exec sleep 1000")
    launcher = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from tests.vllm_env.environment import VllmEnvironment
        from tests.vllm_env.server import VllmServer

        folder = Path({str(tmp_path)!r})
        os.mkfifo(folder / "orphan.log")
        environment = VllmEnvironment(folder=folder / "vllm-0", model_folder=folder / "tiny-model-0")
        print("ready", flush=True)
        VllmServer(environment, name="orphan", folder=folder).start()
        print("started", flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with (tmp_path / "orphan.log").open("rb") as log:
            assert process.stdout.readline() == b"started\n"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert log.read() == b""  # returns once every process that could write has ended


@pytest.mark.parametrize(("required", "outcome"), [("1", "errors"), ("", "skipped")])
def test_without_environment_test_is_skipped_or_fails_where_it_must_not_be(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    monkeypatch.setenv("PREFIX_GATEWAY_REQUIRE_VLLM", required)
    monkeypatch.setenv("PYTHONPATH", os.fspath(REPOSITORY))
    pytester.makepyfile("""
        pytest_plugins = ["tests.vllm_env.fixtures"]

        def test_it(vllm_servers):
            raise AssertionError("it ran")
    """)
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-rs")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*python -m tests.vllm_env build*"])


def test_a_versioned_symbol_goes_to_the_library_of_its_version() -> None:
    asking = SharedObject(
        needed=frozenset({"libcudart.so.13", "libnccl.so.2", "libc.so.6", "libtorch_cpu.so", "libcuda.so.1"}),
        undefined=frozenset(
            {
                Symbol(name="cudaMalloc", version="libcudart.so.13"),
                Symbol(name="ncclSend", version=""),
                Symbol(name="malloc", version="GLIBC_2.2.5"),
                Symbol(name="PyObject_Call", version=""),
            }
        ),
        version_owner={"libcudart.so.13": "libcudart.so.13", "GLIBC_2.2.5": "libc.so.6"},
    )
    nothing = SharedObject(needed=frozenset({"libc.so.6"}), undefined=frozenset(), version_owner={})
    planned = plan({"libtorch_cuda.so": asking, "libtorch_cpu.so": nothing})
    assert {library: {s.name for s in symbols} for library, symbols in planned.items()} == {
        "libcudart.so.13": {"cudaMalloc", "ncclSend"},
        "libnccl.so.2": set(),
    }
    assert "int cudaMalloc(void) { return 100; }" in source(planned["libcudart.so.13"])
    assert version_script(planned["libcudart.so.13"]) == "libcudart.so.13 { global: cudaMalloc; };\n"
